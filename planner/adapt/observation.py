"""What a policy observes of a step, computed from the rows of the step; the same code serves both backends.

Nothing that a scenario declares is used. The delay of a message is the time from the sender's call to the arrival of
its last byte. It consists of the time in the sender's queue, the transmission time and the propagation delay.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from planner.adapt.gradient_noise import NoiseEstimate
from planner.adapt.unused_links import UnusedPath, UnusedPaths, is_link_probe
from planner.events.event import PROBE_ACTION, Event, EventKind, is_exchange
from planner.plan.plan import Plan

# Size of a probe. In runs with a policy each step sends one probe over each path, before one of its messages.
PROBE_BYTES = 16

# Number of steps over which the least delay of a path is its propagation delay, if no probe found an empty queue.
WINDOW_STEPS = 12

# Number of the last probes with an empty queue of which the least delay counts: shared links delay some of them.
_UNQUEUED = 3

# A probe has found an empty queue if it arrives later than the message before it, by this time and this share of its
# delay: behind a message it arrives together with it.
_APART_S, _APART = 0.002, 0.05

# Ratio of neighbouring rates, and of latencies, at which policies search for plans.
GRID = 1.25


def probe_turn(step: int, messages: int) -> int:
    """Return before which of the ``messages`` of a path a probe is sent.

    In the first step that uses the path (``step`` is 0) it is the first message, in the next step the second one, and
    so on in turn, so that some probes of each `WINDOW_STEPS` steps find an empty queue.
    """
    return step % min(messages, WINDOW_STEPS)


def on_grid(value: float, declared: float) -> float:
    """Return the power of `GRID`, times the declared value, that is nearest to an observed rate or latency.

    Two runs, or a run and its simulation, observe links that differ by some percent. A search can answer a difference
    of one percent with other stages, devices and microbatches that are no better.
    """
    if not (value > 0 and 0 < declared < math.inf):
        return value
    return float(declared * GRID ** round(math.log(value / declared, GRID)))


@dataclass(frozen=True, slots=True)
class PathObservation:
    """Traffic from device ``source`` to device ``target`` during a step.

    Attributes:
        size_bytes: Bytes of all messages in the step, backups, migrations and updates included, without probes.
        busy: Intervals (begin, end) in which at least one message was being sent, in order, seconds of the run.
        latency_s: Propagation delay in seconds, which includes the time that software takes to hand over a message: the
            least delay of any message in the last `WINDOW_STEPS` steps that probed the path; of these, since the third
            last one whose probe found an empty queue, if there is one. None if there was no probe; ``busy`` then
            includes the delay.
        queue_s: Mean time that a message waited for earlier messages of the path, seconds.
    """

    source: str
    target: str
    size_bytes: int
    busy: tuple[tuple[float, float], ...]
    latency_s: float | None
    queue_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Time in which at least one message was being sent, seconds."""
        return _length_s(self.busy)

    @property
    def rate_bps(self) -> float:
        """Mean rate while busy, bits per second."""
        return 8 * self.size_bytes / self.busy_s


def joint_rate_bps(paths: Sequence[PathObservation]) -> float:
    """Return the mean rate of several paths together, while at least one of them is busy, bits per second."""
    merged = _merged(interval for path in paths for interval in path.busy)
    return 8 * sum(path.size_bytes for path in paths) / _length_s(merged)


def _merged(intervals: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the union of intervals, as disjoint intervals in order."""
    union: list[tuple[float, float]] = []
    for begin_s, end_s in sorted(intervals):
        if union and begin_s <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end_s)
        else:
            union.append((begin_s, end_s))
    return tuple(union)


def _length_s(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end_s - begin_s for begin_s, end_s in intervals)


@dataclass(frozen=True, slots=True)
class Observation:
    """Measurements of one step.

    Attributes:
        compute_s: Pairs (device, seconds of compute), sorted by device name.
        paths: Paths that carried bytes, sorted by source and target names.
        gone: Devices of the plan that have left during the step; usually empty. If not, the step is unfinished, its
            events so far are observed, and it is repeated with the plan that the policy returns.
        away: Devices of the cluster that are known to be absent now, whether the plan names them or not; a new plan
            must not name them.
        end_s: End of the step's last event, seconds from the start of the run. Since steps overlap, a step's duration
            is the difference between its ``end_s`` and the ``end_s`` of the previous step.
        samples_before: Samples of all steps before this one.
        noise: Estimate of the gradient noise from this step alone, measured or, where none is measured, from the noise
            scale that the scenario assumes; None without both.
        first_plan: The plan with which the run began, before all decisions, also those before it was resumed from a
            checkpoint; None if it is not known.
        left_s: Time that the run is expected to go on after this step, seconds: a move may no longer pay in what is
            left of a short run. Infinite if it is not known, and in observations of steps that devices have left.
        unused: What probes show of paths between regions that the plan does not use, as far as some of them have
            arrived since the step before, sorted by source and target names.
    """

    step: int
    plan: Plan
    compute_s: tuple[tuple[str, float], ...]
    paths: tuple[PathObservation, ...]
    gone: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    end_s: float = 0.0
    samples_before: int = 0
    noise: NoiseEstimate | None = None
    first_plan: Plan | None = None
    left_s: float = math.inf
    unused: tuple[UnusedPath, ...] = ()

    @property
    def missing(self) -> frozenset[str]:
        """Devices that a new plan must not name: those that have left in this step, and those known to be absent."""
        return frozenset({*self.gone, *self.away})


def _is_late(event: Event) -> bool:
    return event.kind in (EventKind.BACKUP, EventKind.MIGRATE) or is_exchange(event) or is_link_probe(event)


def seen_with_steps(events: Sequence[Event]) -> dict[int, list[Event]]:
    """Return the events of a recorded run by the step with which a policy sees them, to show them to a policy again.

    A backup or migration is seen with the first step that ends after it has left its sender, an exchange between
    pipelines or a probe of an unused link with the first one that ends after its arrival; policies of simulated runs
    see some exchanges later.
    """
    parts: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.step >= 0 and event.kind is not EventKind.DECISION and not _is_late(event):
            parts[event.step].append(event)
    ends_s = {step: max(event.end_s for event in part) for step, part in sorted(parts.items())}
    for event in events:
        if _is_late(event):
            over_s = event.arrived_s if is_exchange(event) or is_link_probe(event) else event.end_s
            step = next((step for step, end_s in ends_s.items() if end_s >= over_s), None)
            if step is not None:
                parts[step].append(event)
    return parts


class Observer:
    """Computes the observations of a run, one step after the other."""

    def __init__(self) -> None:
        # By path: the least delays of the last steps, each with whether the probe found an empty queue; when the last
        # message had left the sender, and when it arrived, in seconds.
        self._delays_s = defaultdict[tuple[str, str], "deque[tuple[float, bool]]"](lambda: deque(maxlen=WINDOW_STEPS))
        self._left_s: dict[tuple[str, str], float] = {}
        self._arrived_s: dict[tuple[str, str], float] = {}
        self._unused = UnusedPaths()

    def observe(self, events: Iterable[Event], step: int, plan: Plan) -> Observation:
        """Return the observation of ``step``, which ran ``plan``.

        Events of other steps are ignored, except that backups and migrations keep their path busy, and that probes of
        unused links show their delays.
        """
        compute: defaultdict[str, float] = defaultdict(float)
        sends: defaultdict[tuple[str, str], list[Event]] = defaultdict(list)
        probes: list[Event] = []
        end_s = 0.0
        for event in sorted(events, key=lambda e: (e.start_s, e.end_s, e.device)):
            if is_link_probe(event):
                probes.append(event)
                continue
            # What can be late counts in the step with whose events it comes.
            if _is_late(event) and event.arrived_s >= 0:
                sends[event.device, event.peer].append(event)
            if event.step != step or event.kind is EventKind.BACKUP or is_exchange(event):
                continue
            end_s = max(end_s, event.end_s)
            if event.kind is EventKind.COMPUTE:
                compute[event.device] += event.end_s - event.start_s
            elif event.kind is EventKind.SEND and event.arrived_s >= 0:
                sends[event.device, event.peer].append(event)
        self._unused.add(probes)
        seen = [self._path(source, target, sends[source, target]) for source, target in sorted(sends)]
        paths = tuple(path for path in seen if path.busy_s > 0 and path.size_bytes)
        return Observation(step, plan, tuple(sorted(compute.items())), paths, end_s=end_s, unused=self._unused.take())

    def _path(self, source: str, target: str, sends: Sequence[Event]) -> PathObservation:
        """Return what the sends of a step, sorted by start, show of their path."""
        path, delays_s = (source, target), self._delays_s[source, target]
        least_s = min(send.arrived_s - send.start_s for send in sends)
        for send in sends:
            if send.action == PROBE_ACTION:
                own_s = send.arrived_s - send.start_s
                apart_s = send.arrived_s - self._arrived_s.get(path, -math.inf)
                is_unqueued = apart_s > max(_APART_S, _APART * own_s)
                delays_s.append((least_s, is_unqueued))
            self._arrived_s[path] = max(send.arrived_s, self._arrived_s.get(path, send.arrived_s))
        delay_s = _propagation_s(delays_s)
        size_bytes, queue_s, busy = 0, 0.0, []
        messages = [send for send in sends if send.action != PROBE_ACTION]
        for send in messages:
            begun_s, left_s = max(send.start_s, self._left_s.get(path, send.start_s)), send.arrived_s - delay_s
            size_bytes += send.size_bytes
            busy.append((begun_s, max(begun_s, left_s)))
            queue_s += begun_s - send.start_s
            self._left_s[path] = max(begun_s, left_s, self._left_s.get(path, left_s))
        latency_s = delay_s if delays_s else None
        return PathObservation(source, target, size_bytes, _merged(busy), latency_s, queue_s / max(1, len(messages)))


def _propagation_s(delays_s: Sequence[tuple[float, bool]]) -> float:
    """Return the propagation delay by the least ones of steps, with whether a probe found an empty queue."""
    unqueued = [place for place, (_, is_unqueued) in enumerate(delays_s) if is_unqueued]
    first = unqueued[-_UNQUEUED] if len(unqueued) >= _UNQUEUED else 0
    return min((delay_s for delay_s, _ in islice(delays_s, first, None)), default=0.0)
