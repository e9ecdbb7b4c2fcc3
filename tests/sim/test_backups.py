"""Copies of layers are messages of a simulated run: when they leave, what they delay; real runs send the same ones."""

from collections import Counter
from dataclasses import replace

import pytest

from executor.backend import TorchBackend
from planner.adapt.migration import backup_moves
from planner.events.event import Event, EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.event_totals import step_ends_s, wan_bytes
from planner.runs.record import RunRecord
from planner.scenario.effects import Effects, NetworkEffects
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario
from tests.helpers.strategies.scripted_policy import Scripted


def backups(record: RunRecord) -> list[Event]:
    return sorted((e for e in record.events if e.kind is EventKind.BACKUP), key=lambda e: (e.step, e.device))


def two_stages(parameter_bytes: int = 500, bandwidth_bps: float = 8000.0) -> tuple[Scenario, Plan]:
    """Plain SGD, so that a layer's state is its parameters: a copy takes half a second on the link."""
    scenario = chain_scenario(
        [1.0, 2.0],
        [2.0, 4.0],
        bandwidth_bps=bandwidth_bps,
        latency_s=0.25,
        global_batch=2,
        parameter_bytes=parameter_bytes,
    )
    return scenario, chain_plan(scenario)


def test_by_hand_a_copy_leaves_at_the_start_of_a_step_and_holds_messages_back() -> None:
    scenario, plan = two_stages()
    record = Simulator(backup_every=2).run(scenario, plan, None, 3)
    size_bytes = backup_moves(plan, scenario)[0].size_bytes
    first, second, *later = backups(record)
    assert (first.step, first.device, first.peer, first.size_bytes) == (0, "device-0", "device-1", size_bytes)
    copy_s = 8 * size_bytes / 8000
    assert (first.start_s, first.end_s, first.arrived_s) == (0.0, copy_s, copy_s + 0.25)
    assert (second.step, second.device, second.peer) == (0, "device-1", "device-0")
    assert [(e.step, e.device) for e in later] == [(2, "device-0"), (2, "device-1")]
    assert wan_bytes(record.events, scenario.cluster) == 4 * size_bytes + wan_bytes(
        Simulator().run(scenario, plan, None, 3).events, scenario.cluster
    )
    # The first activation is ready after 1 s and leaves after the copy if that is longer.
    sent = next(event for event in record.events if event.kind is EventKind.SEND)
    assert sent.end_s == max(1.0, copy_s) + 1.0


def test_copies_are_skipped_while_those_of_two_steps_are_under_way() -> None:
    # A copy from the last device to the first takes 100 s, over a link of its own; a step takes 18 s.
    scenario = mesh_scenario(
        3,
        [1.0] * 3,
        [1.0] * 3,
        link=lambda a, b: (8000.0, 0.0) if (a, b) == (2, 0) else (1e9, 0.0),
        parameter_bytes=[100_000] * 3,
        global_batch=6,
    )
    plan = layered_plan(scenario, [([(1, 1, 1), (2, 1, 1), (3, 1, 1)], [6])])
    record = Simulator(backup_every=1).run(scenario, plan, None, 12)
    assert round(step_ends_s(record.events)[0]) == 36
    slow = [event for event in backups(record) if event.device == "device-2"]
    assert [event.step for event in slow][:2] == [0, 1]
    assert [round(event.arrived_s) for event in slow][:2] == [100, 200]
    assert 3 < len(slow) < 12
    for event in slow:
        assert sum(other.step < event.step and other.arrived_s > event.start_s for other in slow) < 2
    assert {event.step for event in backups(record)} == {event.step for event in slow}


def test_without_backups_nothing_changes() -> None:
    scenario, plan = two_stages()
    assert (
        Simulator(backup_every=0).run(scenario, plan, None, 3).events == Simulator().run(scenario, plan, None, 3).events
    )


def test_layers_that_moved_are_copied_before_the_next_step() -> None:
    scenario = chain_scenario([0.1] * 4, [0.2] * 4, bandwidth_bps=1e6, latency_s=0.01, parameter_bytes=1000)
    names = [device.name for device in scenario.cluster.devices][:2]
    before = _cut(scenario, names, 2)
    after = _cut(scenario, names, 1)
    record = Simulator(backup_every=100).run(scenario, before, Scripted({1: after}), 6)
    assert sorted({event.step for event in backups(record)}) == [0, 3]


def _cut(scenario: Scenario, names: list[str], layer: int) -> Plan:
    stages = (Stage(0, layer, (Replica(names[0]),), 2), Stage(layer, 4, (Replica(names[1]),), 1))
    pipeline = Pipeline(stages, (scenario.training.global_batch,))
    return Plan(scenario.name, scenario.model.name, "by hand", "1f1b", (pipeline,))


def test_devices_that_sum_gradients_beside_their_actions_copy_once() -> None:
    scenario = mesh_scenario(3, [0.1] * 2, [0.1] * 2, link=lambda a, b: (1e9, 0.001), parameter_bytes=[4000, 4000])
    plan = layered_plan(scenario, [([(1, 2, 1), (2, 1, 1)], [4, 4])])
    plan = replace(plan, synchronisation=Synchronisation(bucket_bytes=1))
    record = Simulator(backup_every=1).run(scenario, plan, None, 3)
    assert [(event.step, event.device, event.peer) for event in backups(record)] == [
        (step, "device-2", "device-0") for step in range(3)
    ]


@pytest.mark.parametrize("interval", [1, 2])
def test_a_real_run_sends_the_same_copies(interval: int) -> None:
    scenario = chain_scenario(
        [0.01, 0.01, 0.01],
        [0.02, 0.02, 0.02],
        bandwidth_bps=200e6,
        latency_s=0.01,
        parameter_bytes=20_000,
        global_batch=8,
    )
    scenario = replace(scenario, effects=Effects(network=NetworkEffects(ready_notice=True)))
    plan = chain_plan(scenario, microbatches=[2] * 4)
    simulated = Simulator(backup_every=interval).run(scenario, plan, None, 6)
    real = TorchBackend("paced", emulator="shaper", backup_every=interval).run(scenario, plan, None, 6)

    def sent(record: RunRecord) -> Counter[tuple[object, ...]]:
        # The rows of the last step's copies can come too late for the log.
        return Counter((e.step, e.device, e.peer, e.size_bytes) for e in backups(record) if e.step < 4)

    assert sent(real) == sent(simulated)
