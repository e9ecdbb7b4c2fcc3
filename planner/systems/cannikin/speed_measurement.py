"""What the events of a data-parallel step say of its devices and of its sums."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from planner.events.events import Event, EventKind
from planner.plan.plan import Plan
from planner.systems.cannikin.node_speeds import SumTimes
from planner.systems.cannikin.speed_learning import NodeTimes

_BACKWARD = {"B", "I", "W"}


def measured_nodes(events: Iterable[Event], step: int, plan: Plan) -> Mapping[str, NodeTimes]:
    """Return what each device took for a microbatch in a step of a plan of one stage.

    Devices without samples are left out.
    """
    forward_s: defaultdict[str, float] = defaultdict(float)
    backward_s: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.step == step and event.kind is EventKind.COMPUTE and event.stage >= 0:
            if event.action in _BACKWARD:
                backward_s[event.device] += event.end_s - event.start_s
            elif event.action == "F":
                forward_s[event.device] += event.end_s - event.start_s
    samples = samples_per_microbatch(plan)
    count = len(plan.pipelines[0].microbatches)
    return {
        device: NodeTimes(samples[device], forward_s[device] / count, backward_s[device] / count)
        for device in samples
        if samples[device] > 0
    }


def samples_per_microbatch(plan: Plan) -> Mapping[str, float]:
    """Return the mean samples of a microbatch that each device of a plan of one stage takes."""
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    taken: defaultdict[str, int] = defaultdict(int)
    for size in pipeline.microbatches:
        for replica, (first, end) in zip(stage.replicas, stage.intervals(size), strict=True):
            taken[replica.device] += end - first
    return {device: count / len(pipeline.microbatches) for device, count in taken.items()}


def measured_sums(events: Iterable[Event], step: int) -> tuple[SumTimes, ...]:
    """Return what each device saw of the sums of a step that overlap with backward, in the order of their names.

    A sum lasts from when the device could begin it to its end: for all but the last device that includes waiting.
    """
    backwards: dict[str, Event] = {}
    sums: defaultdict[str, list[Event]] = defaultdict(list)
    for event in sorted((each for each in events if each.step == step), key=lambda each: each.start_s):
        if event.kind is EventKind.COMPUTE and event.action in _BACKWARD:
            backwards[event.device] = event
        elif event.kind is EventKind.SYNC:
            sums[event.device].append(event)
    return tuple(_seen_by(backwards[device], sums[device]) for device in sorted(sums) if device in backwards)


def _seen_by(backward: Event, sums: list[Event]) -> SumTimes:
    *overlapped, last = sums
    lasted_s = backward.end_s - backward.start_s
    first_share = (sums[0].start_s - backward.start_s) / lasted_s if overlapped and lasted_s > 0 else 1.0
    return SumTimes(
        min(1.0, max(0.0, first_share)),
        sum(event.end_s - event.start_s for event in overlapped),
        last.end_s - last.start_s,
    )
