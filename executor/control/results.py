"""The results of a job: the rows of its events with corrected ends of sends, its losses and its parameters.

The operating system accepts megabytes from a sender at once and sends them later, so a sender cannot measure when the
last byte of a message departs. This time is computed: the receiver's time of arrival less the latency of the path.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from executor.control.policy_driver import PolicyDriver
from executor.core.job import Emulator, JobFolder
from planner.events.event import UPDATE_ACTION, Event, EventKind, fault_events, read_events
from planner.plan.actions import Kind
from planner.runs.gradient_noise import GradientNorms
from planner.scenario.cluster import Cluster
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario

# Identifies a message: sender, receiver, step, action, pipeline, receiving stage, microbatch.
_Identity = tuple[str, str, int, str, int, int, int]

# A single device has no other gradient to compare with.
_FEWEST_DEVICES = 2


def settling(
    emulator: Emulator, cluster: Cluster, *, is_spread: bool = False
) -> Callable[[Iterable[Event]], list[Event]]:
    """Return the function that corrects when each send ended in the events of all ranks (`settle_departures`).

    With a `LinkShaper` the ends are correct already, and only the receives of zero length are removed. Otherwise the
    correction needs the latency of the path between two devices: 0 on one machine without emulated links; that of the
    cluster's links with the relay, and on several machines (``is_spread``).
    """
    if emulator == "shaper":
        return lambda events: [event for event in events if not _only_tells(event)]

    def latency_s(source: str, target: str, now_s: float) -> float:
        if emulator == "none" and not is_spread:
            return 0.0
        return sum(link.latency_at_s(max(0.0, now_s)) for link in cluster.path(source, target))

    return lambda events: settle_departures(events, latency_s)


def settle_departures(events: Iterable[Event], latency_s: Callable[[str, str, float], float]) -> list[Event]:
    """Return the rows with corrected ends of sends, and without receives of zero length, which only mark arrivals.

    ``latency_s`` returns the one-way latency in seconds between two devices at a run second.
    """
    rows = list(events)
    arrivals: defaultdict[_Identity, deque[Event]] = defaultdict(deque)
    for event in sorted(rows, key=_arrived_s):
        if event.kind is EventKind.RECEIVE:
            arrivals[_identity(event, event.peer, event.device, event.stage)].append(event)
        elif event.kind is EventKind.UPDATE:
            told = replace(event, action=UPDATE_ACTION)
            arrivals[_identity(told, event.peer, event.device, event.stage)].append(event)
    settled = []
    for event in rows:
        if event.kind in (EventKind.SEND, EventKind.MIGRATE):
            waiting = arrivals[_identity(event, event.device, event.peer, _receiving_stage(event))]
            if waiting:
                arrived_s = _arrived_s(waiting.popleft())
                left_s = arrived_s - latency_s(event.device, event.peer, arrived_s)
                event = replace(event, end_s=max(event.start_s, left_s))
        if not _only_tells(event):
            settled.append(event)
    return settled


def _only_tells(event: Event) -> bool:
    return event.kind is EventKind.RECEIVE and event.start_s == event.end_s


def _arrived_s(event: Event) -> float:
    """Return when a message arrived: the end of a receive's row, or the start of an update's row."""
    return event.start_s if event.kind is EventKind.UPDATE else event.end_s


def _identity(event: Event, source: str, target: str, stage: int) -> _Identity:
    # Gradient sums have no stage, and their sender and receiver may be in different pipelines.
    between_stages = event.action in set(Kind)
    pipeline, stage = (event.pipeline, stage) if between_stages else (-1, -1)
    return source, target, event.step, event.action, pipeline, stage, event.microbatch


def _receiving_stage(event: Event) -> int:
    return event.stage + 1 if event.action == Kind.FORWARD else event.stage - 1


def all_events(job: JobFolder, ranks: int) -> list[Event]:
    """Return the rows in the event files of all ranks, in the order of the ranks."""
    return [event for rank in range(ranks) for event in read_events(job.of_rank("events", rank))]


def total_losses(job: JobFolder, ranks: int) -> dict[int, float]:
    """Return a dictionary of steps to losses: sums over the ranks that compute a part of the loss."""
    total: defaultdict[int, float] = defaultdict(float)
    for rank in range(ranks):
        for step, loss in json.loads(job.of_rank("losses", rank).read_text()):
            total[step] += loss
    return total


def faults_of(scenario: Scenario, driver: PolicyDriver, events: list[Event]) -> list[Event]:
    """Return the rows of a run's faults: the link outages of the scenario, and the absences found in the run."""
    end_s = max(event.end_s for event in events)
    outages = [fault for fault in scenario.faults if isinstance(fault, LinkOutage)]
    return [*fault_events(outages, end_s), *driver.absences.events(end_s)]


def gather_norms(job: JobFolder, ranks: int) -> tuple[GradientNorms, ...]:
    """Return the norms of all ranks by step; empty if they were not measured."""
    by_step: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in filter(lambda path: path.exists(), (job.of_rank("norms", rank) for rank in range(ranks))):
        for line in path.read_text().splitlines():
            norms = json.loads(line)
            by_step[norms["step"]].append(norms)
    return tuple(
        GradientNorms(
            step,
            tuple(part["samples"] for part in parts),
            tuple(part["local_squared_norm"] for part in parts),
            parts[0]["global_squared_norm"],
        )
        for step, parts in sorted(by_step.items())
        if len(parts) >= _FEWEST_DEVICES
    )


def merge_parameters(job: JobFolder, ranks: int, target: Path) -> None:
    """Write a safetensors file with the parameters of all layers, each layer from the highest rank that has it.

    Replicas in a pipeline have equal parameters; pipelines that update asynchronously may have different ones.
    """
    # Loads torch, which paced runs do not need.
    from safetensors import safe_open
    from safetensors.torch import save_file

    merged = {}
    # Ranks that were lost, and not replaced, have no file.
    for rank in filter(lambda rank: job.of_rank("parameters", rank).exists(), range(ranks)):
        with safe_open(job.of_rank("parameters", rank), framework="pt") as file:
            merged.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    save_file(merged, target)
