"""Throughput, bubbles, utilisation, WAN bytes and cost, from events: one piece of code for both backends."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planner.backend import RunRecord
from planner.cluster import Cluster
from planner.events import Event, EventKind


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a run amounts to.

    Attributes:
        steps: Steps finished.
        step_s: Median time from the end of one step to the end of the next, seconds.
        samples_per_s: Global throughput after the first step, which warms up; over it if it is the only one.
        bubble_ratio: Idle share of all device time.
        utilisation: Busy share of each device's time.
        wan_bytes: Bytes sent between regions.
        cost_usd: Devices by the hour and links by the byte.
    """

    steps: int
    step_s: float
    samples_per_s: float
    bubble_ratio: float
    utilisation: Mapping[str, float]
    wan_bytes: int
    cost_usd: float


def measure(record: RunRecord) -> Metrics:
    """Return the metrics of a run.

    A step ends when the last device has done its last compute or gradient sum of it.
    """
    devices = record.plan.devices
    work = [e for e in record.events if e.kind in (EventKind.COMPUTE, EventKind.SYNC)]
    start_s = min(event.start_s for event in work)
    ends_s = step_ends_s(record.events)
    durations_s = [end - begin for begin, end in zip([start_s, *ends_s], ends_s, strict=False)]
    later_s = durations_s[1:] or durations_s
    total_s = ends_s[-1] - start_s
    busy_s = dict.fromkeys(devices, 0.0)
    for event in work:
        if event.kind is EventKind.COMPUTE:
            busy_s[event.device] += event.end_s - event.start_s
    return Metrics(
        steps=len(ends_s),
        step_s=median(later_s),
        samples_per_s=record.plan.global_batch * len(later_s) / sum(later_s),
        bubble_ratio=1 - sum(busy_s.values()) / (len(devices) * total_s),
        utilisation={device: busy / total_s for device, busy in busy_s.items()},
        wan_bytes=wan_bytes(record.events, record.scenario.cluster),
        cost_usd=_cost_usd(record.events, record.scenario.cluster, devices, total_s),
    )


def step_ends_s(events: Sequence[Event]) -> list[float]:
    """Return when each step ended, in seconds from the start of the run."""
    ends: defaultdict[int, float] = defaultdict(float)
    for event in events:
        if event.kind in (EventKind.COMPUTE, EventKind.SYNC):
            ends[event.step] = max(ends[event.step], event.end_s)
    return [ends[step] for step in sorted(ends)]


def wan_bytes(events: Sequence[Event], cluster: Cluster) -> int:
    """Return the bytes sent between regions."""
    return sum(
        event.size_bytes
        for event in events
        if event.kind is EventKind.SEND and cluster.crosses_regions(event.device, event.peer)
    )


def _cost_usd(events: Sequence[Event], cluster: Cluster, devices: Sequence[str], total_s: float) -> float:
    rent = sum(cluster.by_name[device].price_per_hour for device in devices) * total_s / 3600
    traffic = sum(
        event.size_bytes / 1e9 * sum(link.price_per_gb for link in cluster.path(event.device, event.peer))
        for event in events
        if event.kind is EventKind.SEND
    )
    return rent + traffic
