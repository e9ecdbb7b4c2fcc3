"""Runs for tests of pages: one that changes its plan, and what others could look like."""

from dataclasses import replace
from functools import cache

from planner.events.event import Event, EventKind, fault_event
from planner.runs.record import RunRecord
from planner.systems.deepcee.policy import DepthPolicy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.trace import LinkTrace

STEPS = 24


@cache
def simulated() -> RunRecord:
    """A run on a link that drops to a third, which makes the policy change the plan."""
    scenario = chain_scenario(
        [0.003, 0.004],
        [0.004, 0.006],
        output_bytes=[65536, 0],
        latency_s=0.02,
        trace=LinkTrace([0, 7, 17], [120e6, 40e6, 120e6], 27),  # type: ignore[arg-type]
        global_batch=64,
    )
    record = Simulator().run(scenario, chain_plan(scenario, microbatches=[8] * 8), DepthPolicy(scenario), STEPS)
    assert record.decisions
    return record


def slower(record: RunRecord, backend: str = "paced") -> RunRecord:
    """The same run, 4 % slower, with losses."""
    events = (replace(event, start_s=1.04 * event.start_s, end_s=1.04 * event.end_s) for event in record.events)
    losses = tuple(2.0 / (1 + step) for step in range(STEPS))
    return replace(record, backend=backend, events=tuple(events), losses=losses)


def gone_on(record: RunRecord, steps: int) -> RunRecord:
    """The same run, as if it had begun with a later step."""

    def later(event: Event) -> Event:
        return replace(event, step=event.step + steps) if event.kind is not EventKind.FAULT else event

    decisions = tuple(
        replace(each, observed_step=each.observed_step + steps, first_step=each.first_step + steps)
        for each in record.decisions
    )
    return replace(record, events=tuple(map(later, record.events)), decisions=decisions)


def with_faults(record: RunRecord) -> RunRecord:
    """The same run with a device away for a while, and a link out."""
    faults = (
        fault_event("device-1", "absent", 2.0, 3.0),
        fault_event("region-0", "out", 4.0, 4.5, "region-1"),
    )
    return replace(record, events=(*record.events, *faults))


def on_devices(count: int) -> RunRecord:
    """A short run of a chain of so many devices."""
    scenario = chain_scenario([0.002] * count, [0.004] * count, latency_s=0.01)
    return Simulator().run(scenario, chain_plan(scenario), None, 5)
