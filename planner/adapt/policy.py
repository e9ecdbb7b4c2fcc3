"""Policies: what to do differently, seen from what was observed; the same object in both backends."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from planner.adapt.migration import NO_MIGRATION, Migration
from planner.events.event import Event, EventKind
from planner.plan.plan import Pipeline, Plan


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


# What step k showed can shape step k + 2 at the earliest: while step k + 1 runs, the observation travels and
# the decision comes back, so that nobody waits for either. The simulator keeps the same distance.
DECISION_LAG_STEPS = 2


class Policy(Protocol):
    """Decides on a plan from observations. Pure: a state of its own, no clock, no input or output.

    It knows nothing of the backend: an observation says what happened, the returned plan what should be.
    """

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan to change to, or None to stay.

        Where devices of the plan have gone, None says to wait for their return, and any other plan must do without
        them.

        Args:
            observation: Of one finished step; steps come in order, each once. Or of a step that devices have left
                (``observation.gone``), which is shown again when it is finished.
            plan: The latest plan decided on.
        """


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of plan.

    Attributes:
        observed_step: The step whose observation led to it.
        first_step: The first step that runs the new plan; the observed one, which is done again, where devices have
            gone.
        plan: The new plan.
        change: What is different, for people.
        migration: What travels before the first step.
    """

    observed_step: int
    first_step: int
    plan: Plan
    change: str
    migration: Migration = NO_MIGRATION

    @property
    def answers_departure(self) -> bool:
        """Whether devices had gone, so that a step is done again."""
        return self.first_step <= self.observed_step


def describe_change(old: Plan, new: Plan, migration: Migration = NO_MIGRATION) -> str:
    """Return what differs between two plans, and what travels for it, in one line."""
    parts = [*_changed_devices(old, new), *_changed_layers(old, new)]
    for index, (before, after) in enumerate(zip(old.pipelines, new.pipelines, strict=False)):
        name = f"pipeline {index}: " if len(new.pipelines) > 1 else ""
        if len(before.microbatches) == len(after.microbatches) and before.microbatches != after.microbatches:
            parts.append(f"{name}other sizes of microbatches")
        elif before.microbatches != after.microbatches:
            parts.append(f"{name}microbatches {len(before.microbatches)} -> {len(after.microbatches)}")
        depths = [[stage.in_flight for stage in pipeline.stages] for pipeline in (before, after)]
        if depths[0] != depths[1]:
            parts.append(f"{name}in flight {depths[0]} -> {depths[1]}")
        if before.samples != after.samples:
            parts.append(f"{name}samples {before.samples} -> {after.samples}")
        if _shares(before) != _shares(after) and _devices(before) == _devices(after):
            parts.append(f"{name}samples of replicas {_samples(before)} -> {_samples(after)}")
    for move in migration.moves:
        first, last = move.first_layer, move.end_layer - 1
        layers = f"layers {first} to {last}" if last > first else f"layer {first}"
        parts.append(f"{layers} from {move.source} to {move.target}, {move.size_bytes / 1e6:.1f} MB")
    return "; ".join(parts) or "another plan"


def _changed_devices(old: Plan, new: Plan) -> list[str]:
    dropped = [device for device in old.devices if device not in new.devices]
    joined = [device for device in new.devices if device not in old.devices]
    return [f"{word} {', '.join(names)}" for word, names in (("without", dropped), ("with", joined)) if names]


def _changed_layers(old: Plan, new: Plan) -> list[str]:
    """The numbers of pipelines and of stages, and where stages end."""
    if len(old.pipelines) != len(new.pipelines):
        return [f"pipelines {len(old.pipelines)} -> {len(new.pipelines)}"]
    parts = []
    for index, (before, after) in enumerate(zip(old.pipelines, new.pipelines, strict=True)):
        ends = [[stage.end_layer for stage in pipeline.stages] for pipeline in (before, after)]
        if ends[0] != ends[1]:
            name = f"pipeline {index}: " if len(new.pipelines) > 1 else ""
            parts.append(f"{name}stages end at layers {ends[0]} -> {ends[1]}")
    return parts


def _devices(pipeline: Pipeline) -> list[list[tuple[str, ...]]]:
    return [[replica.devices for replica in stage.replicas] for stage in pipeline.stages]


def _shares(pipeline: Pipeline) -> list[list[float]]:
    return [[replica.share for replica in stage.replicas] for stage in pipeline.stages]


def _samples(pipeline: Pipeline) -> list[list[int]]:
    """Of a step, by stage and replica."""
    sizes = pipeline.microbatches
    return [
        [sum(end - first for first, end in column) for column in zip(*map(stage.intervals, sizes), strict=True)]
        for stage in pipeline.stages
    ]
