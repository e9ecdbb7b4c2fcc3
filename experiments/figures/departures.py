"""When the bytes of a send really left; loads no matplotlib."""

from collections.abc import Iterable, Iterator

from planner.events import Event, EventKind


def departures(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Yield each send with the time from which its bytes left, in seconds from the start of the run.

    A send event starts when the bytes are handed over. Those between two devices leave in order, one at a
    time: what is handed over while another one is leaving waits for its end.
    """
    free_s: dict[tuple[str, str], float] = {}
    sends = (event for event in events if event.kind is EventKind.SEND)
    for event in sorted(sends, key=lambda e: (e.end_s, e.start_s)):
        channel = (event.device, event.peer)
        yield event, max(event.start_s, free_s.get(channel, event.start_s))
        free_s[channel] = event.end_s
