"""What both backends record of devices that are lost or hang, and of those that wait for the norm of gradients."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from executor.backend import TorchBackend
from planner.events.event import UPDATE_ACTION, Event, EventKind
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from planner.scenario.faults import Absence, Fault, Hang
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.helpers.strategies.timeless_rows import rows


def two_stages(faults: Sequence[Fault] = ()) -> tuple[Scenario, Plan]:
    """Two stages with steps of 0.8 s, of which the first one alone computes the last 0.5 s."""
    scenario = chain_scenario(
        [0.05, 0.05], [0.3, 0.1], output_bytes=[20000] * 2, parameter_bytes=40000, latency_s=0.01, global_batch=2
    )
    layers = tuple(replace(layer, update_s=dict.fromkeys(layer.times, 0.01)) for layer in scenario.model.layers)
    scenario = replace(scenario, model=replace(scenario.model, layers=layers), faults=tuple(faults))
    return scenario, chain_plan(scenario)


def both(faults: Sequence[Fault], steps: int) -> tuple[RunRecord, RunRecord]:
    scenario, plan = two_stages(faults)
    simulated = Simulator(backup_every=1).run(scenario, plan, None, steps)
    return simulated, TorchBackend("paced", emulator="shaper", backup_every=1).run(scenario, plan, None, steps)


def test_both_repeat_the_steps_since_the_copies_when_a_device_is_waited_for() -> None:
    """The device leaves in its last action of a step that the other one has finished, and returns."""
    records = both((Absence("device-0", 2.25, 3.0),), 5)

    def kept(record: RunRecord) -> Counter[tuple[object, ...]]:
        # A killed process has not told what it had done of the step that is lost.
        return Counter({row: n for row, n in rows(record).items() if row[1] != "device-0" and row[0] != "fault"})

    assert kept(records[0]) == kept(records[1])
    computed = [(e.step, e.action) for e in records[0].events if e.device == "device-1" and e.kind == "compute"]
    # The update of the lost step was reverted, and has no row.
    again = {2: [4, 1]}
    assert [
        [computed.count((step, "F")) + computed.count((step, "B")), computed.count((step, UPDATE_ACTION))]
        for step in range(5)
    ] == [[8, 1] if step in again else [4, 1] for step in range(5)]


def test_both_record_hangs() -> None:
    def faults(record: RunRecord) -> list[Event]:
        return [event for event in record.events if event.kind is EventKind.FAULT]

    simulated, real = both((Hang("device-1", 0.5, 0.9),), 3)
    assert faults(simulated) == faults(real)
    assert len(faults(real)) == 1


@pytest.mark.timed
def test_no_device_computes_while_it_waits_for_the_norm_of_all_gradients() -> None:
    """The last stage waits for half a second: until the first one has finished the step."""
    scenario, plan = two_stages()
    scenario = replace(scenario, training=replace(scenario.training, clip_norm=1.0))
    for backend in (Simulator(), TorchBackend("paced", emulator="shaper")):
        updates = [e for e in backend.run(scenario, plan, None, 3).events if e.action == UPDATE_ACTION]
        assert len(updates) == 6
        assert max(e.end_s - e.start_s for e in updates) < 0.2
