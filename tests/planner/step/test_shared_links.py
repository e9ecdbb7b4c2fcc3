"""Steps whose messages share links: the evaluator against the simulator, which knows the same flows by events."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from experiments.benches.planning.random_clusters import random_cluster
from planner.check import is_possible
from planner.plan.plan import ALGORITHMS, Plan, Replica
from planner.runs.metrics import measure
from planner.scenario.effects import TCP, ComputeEffects, Effects, NetworkEffects
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.step.shared_links.step_time import shared_step_time_s, steady_step_time_s
from planner.systems.registry import STRATEGIES
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, mesh_scenario
from tests.helpers.scenarios.unlike_scenarios import unlike_scenario
from traces.common.errors import InputError

STRATEGY = st.sampled_from(["megatron", "ddp", "cannikin", "gpipe", "zb-h1-equal", "hetpipe", "deepcee"])


def simulated_s(plan: Plan, scenario: Scenario) -> float:
    return measure(Simulator().run(scenario, plan, None, 1)).step_s


def planned(name: str, scenario: Scenario) -> Plan | None:
    try:
        plan = STRATEGIES[name](scenario)
    except InputError:
        return None
    return plan if is_possible(plan, scenario) else None


@settings(max_examples=60)
@given(
    st.integers(0, 10**5),
    STRATEGY,
    st.sampled_from(ALGORITHMS),
    st.integers(1, 3),
    st.sampled_from([0.5, 1.0]),
    st.booleans(),
)
def test_steps_take_as_long_as_in_the_simulator(
    seed: int, name: str, algorithm: str, connections: int, share: float, blocks: bool
) -> None:
    scenario = random_cluster(seed)
    assume(len(scenario.cluster.devices) <= 12)
    effects = Effects(compute=ComputeEffects(transfers_block=blocks), network=NetworkEffects(share=share))
    scenario = replace(scenario, effects=effects)
    plan = planned(name, scenario)
    assume(plan is not None)
    assert plan is not None
    how = replace(plan.synchronisation, algorithm=algorithm)
    plan = replace(plan, synchronisation=how, connections=connections)
    assume(is_possible(plan, scenario))
    assert shared_step_time_s(plan, scenario) == pytest.approx(simulated_s(plan, scenario), rel=1e-6)


@settings(max_examples=30)
@given(st.integers(0, 10**5), STRATEGY, st.sampled_from(ALGORITHMS), st.booleans())
@example(955, "ddp", "tree", False)
@example(689, "ddp", "tree", False)
def test_steps_of_a_run_overlap_as_in_the_simulator(seed: int, name: str, algorithm: str, blocks: bool) -> None:
    scenario = random_cluster(seed)
    assume(len(scenario.cluster.devices) <= 12)
    scenario = replace(scenario, effects=Effects(compute=ComputeEffects(transfers_block=blocks)))
    plan = planned(name, scenario)
    assume(plan is not None)
    assert plan is not None
    plan = replace(plan, synchronisation=replace(plan.synchronisation, algorithm=algorithm))
    assume(is_possible(plan, scenario))
    # The median of the two steps behind the first one is their mean.
    expected_s = measure(Simulator().run(scenario, plan, None, 3)).step_s
    assert steady_step_time_s(plan, scenario) == pytest.approx(expected_s, rel=1e-6)


@settings(max_examples=40)
@given(st.integers(3, 5), st.randoms(use_true_random=False), st.integers(1, 8), st.sampled_from([0.0, 1e-4]))
def test_windows_that_close_between_sums_open_as_in_the_simulator(
    count: int, random: Random, connections: int, loss: float
) -> None:
    """Rings over wide-area links: after each pause the windows of TCP have to open again."""
    scenario = mesh_scenario(
        count,
        [random.uniform(0.01, 1.0)] * 2,
        [random.uniform(0.01, 1.0)] * 2,
        link=lambda a, b: (random.uniform(2e7, 1e9), random.uniform(0.01, 0.2)),
        regions=[f"region-{number}" for number in range(count)],
        parameter_bytes=[random.randrange(10**5, 2 * 10**7)] * 2,
        global_batch=2 * count,
    )
    links = tuple(replace(link, loss=loss * (at % 3 == 0)) for at, link in enumerate(scenario.cluster.links))
    scenario = replace(
        scenario,
        cluster=replace(scenario.cluster, links=links),
        effects=Effects(network=replace(TCP, ready_notice=False)),
    )
    plan = replace(STRATEGIES["ddp"](scenario), connections=connections)
    expected_s = measure(Simulator().run(scenario, plan, None, 3)).step_s
    assert steady_step_time_s(plan, scenario) == pytest.approx(expected_s, rel=1e-6)


def test_windows_of_a_pipeline_s_connections_close_in_every_step() -> None:
    # Both directions are busy in turn, so that acknowledgements wait for nothing: a step takes over twice as long.
    scenario = chain_scenario(
        [1.0, 1.0], [1.0, 1.0], output_bytes=[10**6, 0], bandwidth_bps=1e9, latency_s=0.2, global_batch=1
    )
    open_s = steady_step_time_s(plan := chain_plan(scenario, microbatches=[1]), scenario)
    scenario = replace(scenario, effects=Effects(network=TCP))
    expected_s = measure(Simulator().run(scenario, plan, None, 3)).step_s
    assert expected_s > 1.5 * open_s
    assert steady_step_time_s(plan, scenario) == pytest.approx(expected_s, rel=1e-3)


@settings(max_examples=20)
@given(st.integers(0, 10**6), STRATEGY)
def test_links_of_ones_own_are_as_they_were(seed: int, name: str) -> None:
    # Each pair of devices has links that no other pair uses.
    scenario = unlike_scenario(seed, (2, 4), (1, 4), 8)
    plan = planned(name, scenario)
    if plan is not None:
        assert shared_step_time_s(plan, scenario) == step_time_s(plan, scenario)


def test_two_flows_of_one_link_by_hand() -> None:
    # Outputs and gradients of 1000 bytes at 8 kbit/s take 1 s alone, and 2 s beside those of a twin.
    scenario = chain_scenario(
        [1.0, 1.0], [0.0, 0.0], output_bytes=[1000, 0], bandwidth_bps=8e3, parameter_bytes=0, global_batch=2
    )
    plan, cluster = chain_plan(scenario, microbatches=[1]), scenario.cluster
    twins = tuple(replace(device, name=f"{device.name}-twin") for device in cluster.devices)
    scenario = replace(scenario, cluster=replace(cluster, devices=(*cluster.devices, *twins)))
    (pipeline,) = plan.pipelines
    stages = [
        replace(stage, replicas=(Replica(twin.name),)) for stage, twin in zip(pipeline.stages, twins, strict=True)
    ]
    both = replace(plan, pipelines=(pipeline, replace(pipeline, stages=tuple(stages))))
    assert shared_step_time_s(plan, scenario) == pytest.approx(1 + 1 + 1 + 1)
    assert shared_step_time_s(both, scenario) == pytest.approx(1 + 2 + 1 + 2)
    assert step_time_s(both, scenario) == pytest.approx(4)
