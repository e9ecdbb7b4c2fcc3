"""What a job has left: its rows with the true ends of sends, its losses and its parameters.

A sender hands its bytes to the operating system, which takes megabytes at once and sends them when it can; only the
receiver sees when they are through. What the path itself takes, its latency, lies between the two.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from executor.control.policy_driver import PolicyDriver
from executor.core.job import Emulator, JobFolder
from planner.events.event import UPDATE_ACTION, Event, EventKind, fault_events, read_events
from planner.plan.actions import Kind
from planner.scenario.cluster import Cluster
from planner.scenario.faults import LinkOutage
from planner.scenario.scenario import Scenario

# Source, target, step, action, pipeline, receiving stage, microbatch.
_Identity = tuple[str, str, int, str, int, int, int]


def settling(
    emulator: Emulator, cluster: Cluster, *, is_spread: bool = False
) -> Callable[[Iterable[Event]], list[Event]]:
    """Return what makes the rows of all ranks into those of a run.

    A `LinkShaper` knows when bytes have left. The relay's paths, and those between machines, have the latencies of the
    cluster's links; without either bytes pass through this machine, in no time.
    """
    if emulator == "shaper":
        return lambda events: [event for event in events if not _only_tells(event)]

    def latency_s(source: str, target: str, now_s: float) -> float:
        if emulator == "none" and not is_spread:
            return 0.0
        return sum(link.latency_at_s(max(0.0, now_s)) for link in cluster.path(source, target))

    return lambda events: settle_departures(events, latency_s)


def settle_departures(events: Iterable[Event], latency_s: Callable[[str, str, float], float]) -> list[Event]:
    """Return the rows with the true ends of sends, and without the rows that only told of an arrival.

    The rows are those of all ranks; ``latency_s`` gives the one-way latency between two devices at a run second.
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
    """Return when a message had arrived, by the row of its receive or of its update, which ends when it is applied."""
    return event.start_s if event.kind is EventKind.UPDATE else event.end_s


def _identity(event: Event, source: str, target: str, stage: int) -> _Identity:
    # Sums of gradients belong to no stage, and their sender's pipeline need not be the receiver's.
    between_stages = event.action in set(Kind)
    pipeline, stage = (event.pipeline, stage) if between_stages else (-1, -1)
    return source, target, event.step, event.action, pipeline, stage, event.microbatch


def _receiving_stage(event: Event) -> int:
    return event.stage + 1 if event.action == Kind.FORWARD else event.stage - 1


def all_events(job: JobFolder, ranks: int) -> list[Event]:
    """Return the rows that the ranks of a job have written."""
    return [event for rank in range(ranks) for event in read_events(job.of_rank("events", rank))]


def total_losses(job: JobFolder, ranks: int) -> dict[int, float]:
    """Return the loss of each step: the sum over the ranks that have part of it."""
    total: defaultdict[int, float] = defaultdict(float)
    for rank in range(ranks):
        for step, loss in json.loads(job.of_rank("losses", rank).read_text()):
            total[step] += loss
    return total


def faults_of(scenario: Scenario, driver: PolicyDriver, events: list[Event]) -> list[Event]:
    """Return the faults of a run: of links those that were emulated, of devices those that were found."""
    end_s = max(event.end_s for event in events)
    outages = [fault for fault in scenario.faults if isinstance(fault, LinkOutage)]
    return [*fault_events(outages, end_s), *driver.absences.events(end_s)]


def merge_parameters(job: JobFolder, ranks: int, target: Path) -> None:
    """Write one file with every layer once; replicas of a layer have the same values, pipelines may not."""
    merged = {}
    # Ranks that were lost, and not needed any more, have left nothing.
    for rank in filter(lambda rank: job.of_rank("parameters", rank).exists(), range(ranks)):
        with safe_open(job.of_rank("parameters", rank), framework="pt") as file:
            merged.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    save_file(merged, target)
