"""What a policy is shown of one step, derived from its events alone."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from planner.events.event import Event, EventKind
from planner.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class PathObservation:
    """What passed from one device to another during a step.

    Attributes:
        source: Sending device.
        target: Receiving device.
        size_bytes: Sum over the transfers.
        busy_s: Seconds in which at least one of them was under way, waiting for its turn included.
        latency_s: Least time from the last byte's leaving to its arrival, seconds, over the transfers that the
            receiver waited for; None where it waited for none.
    """

    source: str
    target: str
    size_bytes: int
    busy_s: float
    latency_s: float | None

    @property
    def rate_bps(self) -> float:
        """Bits per second while busy."""
        return 8 * self.size_bytes / self.busy_s


@dataclass(frozen=True, slots=True)
class Observation:
    """One finished step.

    Attributes:
        step: Its index.
        plan: What it ran.
        compute_s: (device, seconds of compute) in the order of device names.
        paths: In the order of source and target names; only those that carried something.
        gone: Devices of the plan that have gone, by name. Then the step is not finished, and what is shown of it is
            what had happened until then; it is done again with the plan that is decided on.
        away: Devices of the cluster, those of other plans included, that are known not to be there now: no plan may
            name them. Who has returned is not among them any more.
        end_s: When the last of what is shown ended, seconds of the run; steps overlap, so that how long one took is
            the time from the end of the one before.
    """

    step: int
    plan: Plan
    compute_s: tuple[tuple[str, float], ...]
    paths: tuple[PathObservation, ...]
    gone: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    end_s: float = 0.0


def observe(events: Iterable[Event], step: int, plan: Plan) -> Observation:
    """Return what the events of ``step``, which ran ``plan``, show; events of other steps are passed over."""
    compute: defaultdict[str, float] = defaultdict(float)
    sends: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
    waits: dict[tuple[object, ...], Event] = {}
    end_s = 0.0
    for event in sorted((e for e in events if e.step == step), key=lambda e: (e.start_s, e.end_s, e.device)):
        end_s = max(end_s, event.end_s)
        if event.kind is EventKind.COMPUTE:
            compute[event.device] += event.end_s - event.start_s
        elif event.kind is EventKind.SEND:
            sends[event.device, event.peer].append(event)
        elif event.kind is EventKind.RECEIVE:
            waits[_identity(event, event.peer, event.device)] = event
    paths = [
        PathObservation(source, target, sum(e.size_bytes for e in group), busy_s, _latency_s(group, waits))
        for (source, target), group in sorted(sends.items())
        if (busy_s := _union_s(group)) > 0 and any(event.size_bytes for event in group)
    ]
    return Observation(step, plan, tuple(sorted(compute.items())), tuple(paths), end_s=end_s)


def _identity(event: Event, source: str, target: str) -> tuple[object, ...]:
    return source, target, event.action, event.pipeline, event.microbatch


def _latency_s(sends: list[Event], waits: dict[tuple[object, ...], Event]) -> float | None:
    arrivals = ((send, waits.get(_identity(send, send.device, send.peer))) for send in sends)
    return min((wait.end_s - send.end_s for send, wait in arrivals if wait is not None), default=None)


def _union_s(events: list[Event]) -> float:
    """Length of the union of the events' intervals, seconds; the events come by start."""
    total_s, covered_until_s = 0.0, float("-inf")
    for event in events:
        total_s += max(0.0, event.end_s - max(event.start_s, covered_until_s))
        covered_until_s = max(covered_until_s, event.end_s)
    return total_s
