"""What devices held over a run, against the peaks that the order of actions alone gives."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.adapt.policy import Decision
from planner.check import check_plan
from planner.events.event import EventKind
from planner.plan.plan import ORDERS, Pipeline, Plan, Replica, Stage
from planner.runs.event_totals import step_ends_s
from planner.runs.memory_timeline import leaders, memory_timelines, peak_memory_bytes
from planner.runs.record import RunRecord
from planner.scenario.effects import Effects, MemoryEffects
from planner.scenario.profile import (
    LayerProfile,
    ModelProfile,
    PassMemory,
    SplitMemory,
    TimeTable,
    Workspace,
)
from planner.scenario.scenario import Scenario
from planner.schedules import SCHEDULES
from planner.step.memory import peak_bytes
from planner.step.orders import with_schedule
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario
from tests.helpers.strategies.run_strategies import TIMES_S, chains, replicated
from traces.common.errors import InputError

# The solver is not for hundreds of examples.
QUICK = sorted(set(SCHEDULES) - {"optimal"})

MEMORY = st.builds(MemoryEffects, st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.5]))


SPACES = st.builds(Workspace, st.integers(0, 1000), st.integers(0, 1000))
MEASURED = st.builds(
    PassMemory, st.integers(0, 1000), SPACES, st.builds(SplitMemory, st.integers(0, 3000), *[SPACES] * 3)
)


def with_memory(scenario: Scenario, memory: MemoryEffects) -> Scenario:
    return replace(scenario, effects=replace(Effects(), memory=memory))


def simulated(scenario: Scenario, plan: Plan, steps: int = 2) -> RunRecord:
    return Simulator().run(scenario, plan, None, steps)


def held_at(record: RunRecord, device: str, time_s: float) -> float:
    """Bytes that a device holds just after a moment."""
    line = memory_timelines(record)[device]
    return float(line.held_bytes[np.searchsorted(line.times_s, time_s, side="right") - 1])


@st.composite
def scheduled(draw: st.DrawFn, cases: st.SearchStrategy[tuple[Scenario, Plan]]) -> tuple[Scenario, Plan]:
    """The case with any schedule that fits it, any framework, and layers whose memory was measured or not."""
    scenario, plan = draw(cases)
    scenario = with_memory(scenario, draw(MEMORY))
    if draw(st.booleans()):
        layers = tuple(replace(layer, memory=draw(MEASURED)) for layer in scenario.model.layers)
        scenario = replace(scenario, model=replace(scenario.model, layers=layers))
    plan = replace(plan, pipelines=tuple(replace(each, orders=()) for each in plan.pipelines))
    try:
        plan = with_schedule(plan, scenario, draw(st.sampled_from(QUICK)), draw(st.sampled_from(ORDERS)))
        check_plan(plan, scenario)
    except InputError:
        # A stage of one layer cannot be cut in two, for example.
        assume(False)
    return scenario, plan


@settings(max_examples=150)
@given(scheduled(st.one_of(chains(), replicated())))
def test_the_highest_point_is_the_peak_of_the_order(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    assume(plan.order == "scheduled")
    peaks = peak_memory_bytes(simulated(scenario, plan))
    # Exact but for the bytes of shares and workspaces that are no whole numbers.
    assert peaks == pytest.approx(peak_bytes(plan, scenario), abs=1)


@settings(max_examples=100)
@given(scheduled(st.one_of(chains(), replicated())), st.integers(1, 3))
def test_after_the_last_action_only_what_stands_is_left(case: tuple[Scenario, Plan], steps: int) -> None:
    scenario, plan = case
    record = simulated(scenario, plan, steps)
    standing: dict[str, int] = {}
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        for replica in stage.replicas:
            parameters = scenario.model.parameter_bytes(stage.first_layer, stage.end_layer)
            # Parameters and gradients; plain SGD keeps nothing else.
            before = standing.get(replica.device, scenario.effects.memory.framework_bytes)
            standing[replica.device] = before + 2 * parameters
    for device, line in memory_timelines(record).items():
        assert line.times_s[0] == 0
        assert np.all(np.diff(line.times_s) >= 0)
        assert line.held_bytes[0] == standing[device]
        assert line.held_bytes[-1] == pytest.approx(standing[device], abs=1e-3)
        assert line.held_bytes.min() >= standing[device] - 1e-3


@settings(max_examples=50)
@given(scheduled(chains()))
def test_between_steps_nothing_but_states_is_held(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    record = simulated(scenario, plan, 3)
    last: dict[tuple[str, int], float] = {}
    begins: dict[tuple[str, int], float] = {}
    for event in record.events:
        if event.kind is EventKind.COMPUTE:
            key = event.device, event.step
            last[key] = max(event.end_s, last.get(key, 0.0))
            begins[key] = min(event.start_s, begins.get(key, np.inf))
    lines = memory_timelines(record)
    for (device, step), end_s in last.items():
        if begins.get((device, step + 1), np.inf) > end_s:
            assert held_at(record, device, end_s) == pytest.approx(lines[device].held_bytes[0], abs=1e-3)


@settings(max_examples=30)
@given(
    st.lists(MEASURED, min_size=2, max_size=2),
    st.lists(st.booleans(), min_size=2, max_size=2),
    st.sampled_from(["zb-h1", "zb-h2"]),
    st.floats(1.0, 3.0),
)
def test_schedules_that_limit_memory_stay_within_it(
    measured: list[PassMemory], recompute: list[bool], schedule: str, room: float
) -> None:
    scenario = mesh_scenario(2, [1.0, 1.0], [1.0, 1.0], parameter_bytes=[100, 100], global_batch=6)
    layers = tuple(
        replace(layer, activation_bytes=1000, output_bytes=500, memory=memory)
        for layer, memory in zip(scenario.model.layers, measured, strict=True)
    )
    plan = layered_plan(scenario, [([(1, 1, 3), (2, 1, 3)], [1] * 6)])
    stages = (replace(stage, recompute=each) for stage, each in zip(plan.pipelines[0].stages, recompute, strict=True))
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=tuple(stages)),))
    scenario = replace(scenario, model=replace(scenario.model, layers=layers))
    least = peak_bytes(replace(plan, schedule="1f1b").with_microbatches(0, (1,) * 6, (1, 1)), scenario)
    devices = tuple(replace(each, memory_bytes=round(room * max(least.values()))) for each in scenario.cluster.devices)
    scenario = replace(scenario, cluster=replace(scenario.cluster, devices=devices))
    try:
        peaks = peak_bytes(with_schedule(plan, scenario, schedule), scenario)
    except InputError:
        # One microbatch, split, may need more than one unsplit.
        assume(False)
    assert max(peaks.values()) <= devices[0].memory_bytes


# --- by hand --------------------------------------------------------------------------------------------------


def line_of(record: RunRecord, device: str) -> list[tuple[float, float]]:
    line = memory_timelines(record)[device]
    return list(zip(line.times_s.tolist(), line.held_bytes.tolist(), strict=True))


def test_a_forward_takes_and_a_backward_gives_back() -> None:
    scenario = chain_scenario([1.0], [2.0], parameter_bytes=100, activation_bytes=7, global_batch=2)
    record = simulated(scenario, chain_plan(scenario, depths=[1]), steps=1)
    # F0 0..1, B0 1..3, F1 3..4, B1 4..6; without a workspace a backward takes nothing.
    expected = [(0, 200), (0, 207), (1, 207), (1, 207), (3, 200), (3, 207), (4, 207), (4, 207), (6, 200)]
    assert line_of(record, "device-0") == expected


def test_a_split_backward_gives_back_when_its_weight_gradient_is_done() -> None:
    scenario = chain_scenario([1.0], [2.0], parameter_bytes=100, activation_bytes=8, global_batch=1)
    scenario = with_memory(scenario, MemoryEffects(1000, 0.5))
    record = simulated(scenario, chain_plan(scenario, schedule="zb-h1"), steps=1)
    # F 0..1, I 1..2 with a workspace of 4, W 2..3 without one.
    assert sorted(set(line_of(record, "device-0"))) == [
        (0, 1200),
        (0, 1208),
        (1, 1208),
        (1, 1212),
        (2, 1208),
        (3, 1200),
    ]
    assert peak_memory_bytes(record) == {"device-0": 1212}


@given(st.permutations([0.0, 0.0, 1.0]), st.integers(1, 4))
def test_actions_that_take_no_time_hold_memory_all_the_same(times_s: Sequence[float], microbatches: int) -> None:
    # Layers without a profiled time are read as 0 s.
    forward_s, input_s, weight_s = times_s
    layer = LayerProfile("layer", 100, 0, 10, {"kind": TimeTable((1,), (forward_s,), (input_s,), (weight_s,))})
    scenario = mesh_scenario(1, [1.0], [1.0], global_batch=microbatches)
    scenario = with_memory(replace(scenario, model=ModelProfile("mesh", (layer,))), MemoryEffects(0, 2.0))
    for schedule in ("1f1b", "gpipe", "zb-h1"):
        plan = layered_plan(scenario, [([(1, 1, 1)], [1] * microbatches)], schedule=schedule)
        record = simulated(scenario, plan)
        assert peak_memory_bytes(record) == peak_bytes(plan, scenario)
        assert memory_timelines(record)["device-0"].held_bytes.min() == 200


@settings(max_examples=50)
@given(st.lists(TIMES_S, min_size=2, max_size=2), st.integers(1, 6), MEMORY)
def test_partners_hold_what_their_first_device_does(
    times_s: list[float], microbatches: int, memory: MemoryEffects
) -> None:
    scenario = mesh_scenario(4, times_s, [1.0, 1.0], global_batch=microbatches)
    devices = tuple(replace(device, host=f"host-{index // 2}") for index, device in enumerate(scenario.cluster.devices))
    halves = tuple(replace(layer, parameter_bytes=layer.parameter_bytes // 2) for layer in scenario.model.layers)
    model = ModelProfile("mesh", scenario.model.layers, {2: ModelProfile("mesh", halves)})
    cluster = replace(scenario.cluster, devices=devices)
    scenario = with_memory(replace(scenario, cluster=cluster, model=model), memory)
    stages = tuple(
        Stage(
            number, number + 1, (Replica(f"device-{2 * number}", partners=(f"device-{2 * number + 1}",)),), 2 - number
        )
        for number in range(2)
    )
    plan = Plan(scenario.name, "mesh", "hand", "1f1b", (Pipeline(stages, (1,) * microbatches),))
    check_plan(plan, scenario)
    record = simulated(scenario, plan)
    lines = memory_timelines(record)
    assert lines.keys() == set(plan.devices)
    assert leaders(plan) == {f"device-{number}": f"device-{number - number % 2}" for number in range(4)}
    for device, leader in leaders(plan).items():
        assert line_of(record, device) == line_of(record, leader)
        assert peak_memory_bytes(record)[device] == peak_bytes(plan, scenario)[leader]


def test_after_a_decision_the_new_plan_counts() -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0], parameter_bytes=100, activation_bytes=7, global_batch=8)
    plan = chain_plan(scenario)
    coarse = plan.with_microbatches(0, (4, 4), (2, 1))

    class Once:
        """Decides on the coarser plan after the first step."""

        def decide(self, observation: object, current: Plan) -> Plan | None:
            return coarse if current == plan else None

    record = Simulator().run(scenario, plan, Once(), 4)
    assert record.decisions == (Decision(0, 2, coarse, record.decisions[0].change),)
    assert peak_bytes(plan, scenario)["device-0"] == 200 + 2 * 7
    assert peak_memory_bytes(record) == peak_bytes(coarse, scenario) == {"device-0": 256, "device-1": 228}
    second_s = step_ends_s(record.events)[1]
    early = memory_timelines(record)["device-0"]
    assert early.held_bytes[early.times_s < second_s - 5].max() == 200 + 2 * 7
