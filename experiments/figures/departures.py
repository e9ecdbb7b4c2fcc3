"""When the bytes of a send really left, and which compute they feed; loads no matplotlib."""

from collections.abc import Iterable, Iterator

from planner.actions import Kind
from planner.events import Event, EventKind


def departures(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each send, layers that change devices included, with the time from which its bytes left.

    In seconds from the start of the run.

    A send event starts when the bytes are handed over. Those between two devices leave in order, one at a
    time: what is handed over while another one is leaving waits for its end.
    """
    free_s: dict[tuple[str, str], float] = {}
    sends = (event for event in events if event.kind in (EventKind.SEND, EventKind.MIGRATE))
    for event in sorted(sends, key=lambda e: (e.end_s, e.start_s)):
        channel = (event.device, event.peer)
        yield event, max(event.start_s, free_s.get(channel, event.start_s))
        free_s[channel] = event.end_s


def fed_stage(send: Event) -> int:
    """Return the stage that a send feeds: activations go to the next one, gradients to the one before."""
    return send.stage + 1 if send.action == Kind.FORWARD else send.stage - 1


def input_of(compute: Event) -> tuple[object, ...]:
    """Return what a compute takes from another device, by the key of `input_from`; weight gradients take nothing."""
    action = Kind.BACKWARD if compute.action == Kind.BACKWARD_INPUT else compute.action
    return compute.device, compute.pipeline, compute.stage, compute.step, action, compute.microbatch


def input_from(send: Event) -> tuple[object, ...]:
    """Return what a send feeds, by the key of `input_of`."""
    return send.peer, send.pipeline, fed_stage(send), send.step, send.action, send.microbatch
