"""Throughput, bubble ratio, utilisation, WAN bytes, staleness and cost of a run, computed from its events.

Both backends, the simulator and torch.distributed, record the same kinds of events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from planner.events.event import Event
from planner.plan.plan import Plan
from planner.runs.event_totals import EventTotals, event_totals, worker_steps
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class PlanInterval:
    """The interval of a run in which one plan is in force, including the transfers of layers that the plan needs.

    Attributes:
        first_step: Index of the first step that runs the plan.
        start_s: Start of the interval, seconds from the start of the run: the end of the preceding plan's last step
            or, for a plan made because devices left, the time of the decision.
    """

    plan: Plan
    first_step: int
    start_s: float


def plan_intervals(record: RunRecord, totals: EventTotals, step_ends_s: Sequence[float]) -> list[PlanInterval]:
    """Return the intervals of a run in order; a decision whose plan finished no step has none.

    Args:
        record: The run, whose decisions begin intervals.
        totals: The totals of the run's events.
        step_ends_s: The end of each step as `measure` counts them, seconds from the start of the run.
    """
    # A run that resumes from a checkpoint begins with a step above 0.
    first = totals.first_step
    intervals = [PlanInterval(record.plan, first, 0.0)]
    times_s = answer_times_s(record, totals)
    for number, decision in enumerate(record.decisions):
        since_first = decision.first_step - first
        if since_first >= len(step_ends_s):
            continue
        if decision.answers_departure:
            while intervals[-1].start_s > times_s[number]:
                intervals.pop()
            intervals.append(PlanInterval(decision.plan, decision.first_step, times_s[number]))
        else:
            intervals.append(PlanInterval(decision.plan, decision.first_step, step_ends_s[since_first - 1]))
    return intervals


def answer_times_s(record: RunRecord, totals: EventTotals) -> dict[int, float]:
    """Return when each decision that answers the loss of a device was made, by its index in ``record.decisions``.

    Times are in seconds from the start of the run.
    """
    numbers = [number for number, decision in enumerate(record.decisions) if decision.answers_departure]
    # Both decisions and their events are in the order of time, so the n-th event belongs to the n-th decision.
    return {number: totals.decided_s[number] for number in numbers}


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of a whole run.

    Attributes:
        steps: Number of finished steps.
        step_s: Median time from the end of one step to the end of the next, seconds.
        samples_per_s: Throughput of all steps but the first, which is a warm-up; of the only step if there is just one.
        bubble_ratio: Share of the time of all devices in which they do not compute. A device's time consists of the
            intervals (`PlanInterval`) whose plans include the device.
        utilisation: Share of a device's time in which the device computes, by device. Work that is lost when a device
            leaves counts as compute.
        wan_bytes: Bytes sent between regions.
        cost_usd: Rent of the devices for their time plus the price of traffic on links, US dollars.
        staleness: Mean staleness of the asynchronous updates between pipelines, in steps; 0 without such updates.
    """

    steps: int
    step_s: float
    samples_per_s: float
    bubble_ratio: float
    utilisation: Mapping[str, float]
    wan_bytes: int
    cost_usd: float
    staleness: float


def measure(record: RunRecord, totals: EventTotals | None = None) -> Metrics:
    """Return the metrics of a run; ``totals`` are those of its events, if they are known already.

    A step ends when the last device has finished its last compute action or gradient sum of the step. Where pipelines
    take steps at their own speed, it ends when they have trained the samples of another global batch.
    """
    totals = totals or event_totals(record.events)
    ends_s = _run_ends_s(record, totals)
    durations_s = np.diff([totals.start_s, *ends_s])
    later_s = durations_s[1:] if len(durations_s) > 1 else durations_s
    intervals = plan_intervals(record, totals, ends_s)
    device_s = _device_s(intervals, totals.start_s, ends_s[-1])
    syncer_s = dict.fromkeys(record.plan.synchronisation.outer.syncers, ends_s[-1] - totals.start_s)
    samples = [plan.global_batch for plan in step_plans(intervals, len(ends_s))]
    return Metrics(
        steps=len(ends_s),
        step_s=float(np.median(later_s)),
        samples_per_s=sum(samples[-len(later_s) :]) / float(later_s.sum()),
        bubble_ratio=1 - sum(totals.busy_s.values()) / sum(device_s.values()),
        utilisation={device: totals.busy_s.get(device, 0.0) / own_s for device, own_s in device_s.items() if own_s},
        wan_bytes=totals.wan_bytes(record.scenario.cluster),
        cost_usd=_cost_usd(totals, record.scenario.cluster, {**device_s, **syncer_s}),
        staleness=totals.stale_steps / totals.updates if totals.updates else 0.0,
    )


def step_metrics(record: RunRecord) -> "pd.DataFrame":
    """Return the metrics of each step of a run; `planner.runs.record.RunRecord.metrics` lists the columns."""
    # Imported here, since pandas takes longer to import than the whole planner.
    import pandas as pd

    totals = event_totals(record.events)
    ends_s = np.array(_run_ends_s(record, totals))
    steps = np.arange(len(ends_s)) + totals.first_step
    step_s = np.diff(ends_s, prepend=totals.start_s)
    plans = step_plans(plan_intervals(record, totals, ends_s.tolist()), len(steps))
    samples = np.array([plan.global_batch for plan in plans])
    before = record.samples_before + np.cumsum(samples) - samples
    rate = record.scenario.training.learning_rate
    changes: dict[int, list[str]] = {}
    for decision in record.decisions:
        changes.setdefault(decision.first_step, []).append(decision.change)
    return pd.DataFrame(
        {
            "end_s": ends_s,
            "step_s": step_s,
            "samples": samples,
            "samples_per_s": samples / step_s,
            "learning_rate": [
                rate(trained, plan.global_batch, plan.noise_scale)
                for trained, plan in zip(before.tolist(), plans, strict=True)
            ],
            "loss": record.losses or np.nan,
            "decision": ["; ".join(changes.get(step, ())) for step in steps.tolist()],
        },
        index=pd.Index(steps, name="step"),
    )


def step_plans(intervals: Sequence[PlanInterval], steps: int) -> list[Plan]:
    """Return the plan of each of a run's ``steps`` finished steps."""
    end_step = intervals[0].first_step + steps
    plans: list[Plan] = []
    for number, interval in enumerate(intervals):
        later = (each.first_step for each in intervals[number + 1 :])
        plans += [interval.plan] * (min(later, default=end_step) - intervals[0].first_step - len(plans))
    return plans


def trained_samples(record: RunRecord) -> int:
    """Return the number of samples of all finished steps of a run, each of which may have another global batch."""
    totals = event_totals(record.events)
    ends_s = _run_ends_s(record, totals)
    return sum(plan.global_batch for plan in step_plans(plan_intervals(record, totals, ends_s), len(ends_s)))


def _run_ends_s(record: RunRecord, totals: EventTotals) -> list[float]:
    """Return the end of each step of a run as `measure` counts them, seconds from the start of the run."""
    if record.plan.synchronisation.is_decoupled:
        return batch_ends_s(record.events, record.plan)
    return totals.step_ends_s


def batch_ends_s(events: Sequence[Event], plan: Plan) -> list[float]:
    """Return when pipelines that take steps at their own speed have trained each global batch of samples, seconds.

    Steps that a pipeline has not finished do not count.
    """
    ends = sorted(worker_steps(events))
    trained = np.cumsum([plan.pipelines[pipeline].samples for _, pipeline, _ in ends])
    batches = np.arange(1, trained[-1] // plan.global_batch + 1) if ends else np.zeros(0)
    return [ends[index][0] for index in np.searchsorted(trained, batches * plan.global_batch).tolist()]


def _device_s(intervals: Sequence[PlanInterval], start_s: float, end_s: float) -> dict[str, float]:
    """Return, for each device, the seconds in which the plan in force includes the device."""
    starts_s = [start_s, *(interval.start_s for interval in intervals[1:]), end_s]
    device_s: dict[str, float] = {}
    for interval, (begun_s, over_s) in zip(intervals, pairwise(starts_s), strict=True):
        for device in interval.plan.devices:
            device_s[device] = device_s.get(device, 0.0) + over_s - begun_s
    return device_s


def _cost_usd(totals: EventTotals, cluster: Cluster, device_s: Mapping[str, float]) -> float:
    rent = sum(cluster.by_name[device].price_per_hour * own_s for device, own_s in device_s.items()) / 3600
    traffic = sum(
        size / 1e9 * sum(link.price_per_gb for link in cluster.path(*ends)) for ends, size in totals.sent_bytes.items()
    )
    return rent + traffic
