"""Stragglers, slow-downs and jitter are the same in simulated, paced and real runs."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.backend import TorchBackend
from executor.training.compute import MOST_LATE_S
from planner.cost.device_speed import DeviceSpeed, device_speed
from planner.events.event import Event, EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.record import RunRecord
from planner.scenario.effects import ComputeEffects, Effects, Slowdown, Straggler
from planner.scenario.scenario import Scenario
from sim.kernel.piecewise import RateTable, join_tables, resumes_s, time_of
from sim.simulator import Simulator
from tests.helpers.processes.training import chain, train_in_one_process
from tests.helpers.scenarios.builders import chain_scenario

SLOW = ComputeEffects(
    stragglers=(Straggler("device-0", 1.5),),
    slowdowns=(Slowdown("device-0", (0.0, 0.15, 0.3), (1.0, 0.4, 0.8)),),
)


def computed(record: RunRecord) -> list[Event]:
    return [event for event in record.events if event.kind is EventKind.COMPUTE]


def on_one_device(effects: ComputeEffects) -> tuple[Scenario, Plan]:
    scenario = chain_scenario([0.006, 0.004], [0.012, 0.008], global_batch=4)
    scenario = replace(scenario, effects=Effects(compute=effects))
    pipeline = Pipeline((Stage(0, 2, (Replica("device-0"),), 1),), (1, 1, 1, 1))
    return scenario, Plan(scenario.name, scenario.model.name, "by hand", "1f1b", (pipeline,))


def due_in_time(events: list[Event]) -> int:
    """How many actions ended until the machine had stopped for long."""
    return 1 + next((number for number, event in enumerate(events) if event.late_s >= MOST_LATE_S), len(events))


@pytest.mark.parametrize("effects", [SLOW, replace(SLOW, jitter=0.5, seed=3)], ids=["slow", "jitter"])
def test_paced_actions_are_due_when_the_simulator_ends_them(effects: ComputeEffects) -> None:
    scenario, plan = on_one_device(effects)
    runs = (computed(TorchBackend("paced").run(scenario, plan, None, 4)) for _ in range(5))
    # Of a run in which the machine stops early, little can be compared.
    events = next(events for events in runs if due_in_time(events) > len(events) // 4)
    # The first action begins a moment after second 0.
    begun_s = events[0].start_s
    (slowdown,) = effects.slowdowns
    times_s = (0.0, *(time_s - begun_s for time_s in slowdown.times_s[1:]))
    scenario, _ = on_one_device(replace(effects, slowdowns=(replace(slowdown, times_s=times_s),)))
    expected_s = [begun_s + event.end_s for event in computed(Simulator().run(scenario, plan, None, 4))]
    # After a longer stop of the machine, time goes on from there.
    kept = due_in_time(events)
    assert [event.end_s - event.late_s for event in events[:kept]] == pytest.approx(expected_s[:kept], abs=1e-4)
    assert all(event.late_s >= 0 for event in events)
    assert all(before.end_s <= after.start_s for before, after in pairwise(events))


@given(
    st.lists(st.tuples(st.floats(0.01, 5.0), st.sampled_from([0.0, 0.25, 1.0, 3.0])), max_size=5),
    st.floats(0.0, 20.0),
    st.floats(1e-6, 20.0),
)
def test_an_action_ends_when_the_simulators_compiled_code_ends_it(
    pieces: list[tuple[float, float]], start_s: float, work_s: float
) -> None:
    times_s, speeds = [0.0], [1.0]
    for length_s, speed in pieces:
        times_s.append(times_s[-1] + length_s)
        speeds.append(speed)
    times_s.append(times_s[-1] + 1.0)
    speeds.append(0.5)
    tables = join_tables([RateTable(times_s, speeds)])
    expected_s = time_of(tables, 0, work_s, resumes_s(tables, 0, start_s), float("inf"))
    assert DeviceSpeed(tuple(times_s), tuple(speeds)).end_s(start_s, work_s) == pytest.approx(expected_s, rel=1e-9)


def test_devices_that_compute_together_are_as_fast_as_the_slowest() -> None:
    effects = replace(SLOW, stragglers=(Straggler("device-1", 2.0),))
    assert device_speed(effects, ["device-0", "device-1"]) == DeviceSpeed((0.0, 0.15, 0.3), (0.5, 0.4, 0.5))
    assert device_speed(ComputeEffects(), ["device-0"]) == DeviceSpeed()


def test_real_compute_is_slowed_down_and_trains_the_same() -> None:
    scenario, plan = chain()
    factor = 4.0
    effects = ComputeEffects(stragglers=(Straggler("device-1", factor),))
    slowed = replace(scenario, effects=replace(scenario.effects, compute=effects))
    usual, slow = (TorchBackend("real").run(each, plan, None, 6) for each in (scenario, slowed))
    assert slow.losses == usual.losses == pytest.approx(train_in_one_process(scenario, 6).losses, rel=1e-4)

    def work_s(record: RunRecord, device: str) -> float:
        durations_s = sorted(e.end_s - e.start_s for e in computed(record) if e.device == device and e.action == "B")
        return durations_s[len(durations_s) // 2]

    assert work_s(slow, "device-1") > 2 * work_s(usual, "device-1")
