import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.runs.scenario import choose_scenario
from planner.explain.explanation import Explanation, explain
from planner.explain.loads import link_busy_shares, longest_latency_link
from planner.explain.sensitivity import BETTER, sensitivity_of
from planner.plan.plan import Plan, Replica, Stage
from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import (
    Scenario,
    with_better_links,
)
from planner.step.evaluate import step_time_s
from planner.systems.registry import make_plan
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario


def bound_by_compute() -> tuple[Scenario, Plan]:
    scenario = chain_scenario([1.0, 3.0], [2.0, 6.0], bandwidth_bps=1e9, latency_s=1e-3)
    return scenario, chain_plan(scenario)


def bound_by_link() -> tuple[Scenario, Plan]:
    # 8 kbit take 4 s on links of 2 kbit/s; computing takes 0.3 s.
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], bandwidth_bps=2e3, latency_s=1e-3, global_batch=16)
    return scenario, chain_plan(scenario, depths=[16, 16], schedule="gpipe")


def bound_by_latency() -> tuple[Scenario, Plan]:
    scenario = chain_scenario([0.1, 0.1], [0.2, 0.2], bandwidth_bps=1e9, latency_s=5.0, global_batch=2)
    return scenario, chain_plan(scenario)


def bound_by_memory() -> tuple[Scenario, Plan]:
    # Room for two microbatches in flight; a round trip lasts as long as ten.
    scenario = chain_scenario(
        [0.1, 0.1],
        [0.2, 0.2],
        latency_s=1.5,
        global_batch=20,
        parameter_bytes=0,
        activation_bytes=1000,
        memory_bytes=2500,
    )
    return scenario, chain_plan(scenario, depths=[2, 1])


def bound_by_sums() -> tuple[Scenario, Plan]:
    scenario = mesh_scenario(
        3, [0.1], [0.2], parameter_bytes=[4_000_000], link=lambda a, b: (1e6, 1e-3), global_batch=6
    )
    return scenario, layered_plan(scenario, [([(1, 3, 1)], [6])])


CASES = {
    "compute": bound_by_compute,
    "link": bound_by_link,
    "latency": bound_by_latency,
    "memory": bound_by_memory,
    "sums of gradients": bound_by_sums,
}


@pytest.mark.parametrize("cause", CASES)
def test_what_obviously_binds_is_said_to_bind(cause: str) -> None:
    scenario, plan = CASES[cause]()
    explanation = explain(plan, scenario)
    assert explanation.verdict.cause == cause
    assert explanation.verdict.shorter_share > 0.05
    assert explanation.verdict.sentence in str(explanation)
    assert cause.split()[0] in explanation.verdict.sentence
    again = json.loads(json.dumps(explanation.document()))
    assert again["verdict"]["cause"] == cause
    assert again["step_s"] == step_time_s(plan, scenario)


def test_the_slowest_stage_is_named() -> None:
    scenario, plan = bound_by_compute()
    verdict = explain(plan, scenario).verdict
    assert verdict.place == "stage 1 of pipeline 0"
    faster_s = step_time_s(plan, scenario, slowdown={"device-1": 1 / BETTER})
    assert verdict.there_share == pytest.approx(1 - faster_s / step_time_s(plan, scenario))
    assert verdict.shorter_share >= verdict.there_share


def test_figures_of_a_pipeline_that_can_be_counted_by_hand() -> None:
    # One microbatch: F 1 s, 1 s on the link, 2 s of latency, F and B 3 s,
    # the way back 3 s, B 2 s: 12 s.
    scenario = chain_scenario([1.0, 1.0], [2.0, 2.0], bandwidth_bps=8e3, latency_s=2.0, global_batch=1)
    (loads,) = explain(chain_plan(scenario), scenario).pipelines
    first, second = loads.stages
    assert (first.compute_s, second.compute_s) == (3.0, 3.0)
    assert first.idle_share == pytest.approx(9 / 12)
    assert [boundary.busy_share for boundary in loads.boundaries] == pytest.approx([1 / 12] * 2)
    assert [boundary.latency_s for boundary in loads.boundaries] == [2.0, 2.0]
    assert [(each.source, each.target) for each in loads.boundaries] == [
        ("device-0", "device-1"),
        ("device-1", "device-0"),
    ]
    # Parameters and gradients of SGD, and the activations of one microbatch.
    assert first.memory_bytes == 2 * 4000 + 1000
    assert (first.in_flight, first.hiding_depth) == (2, 2)


@settings(max_examples=30)
@given(
    st.lists(st.floats(0.1, 5), min_size=2, max_size=4),
    st.floats(1e3, 1e6),
    st.floats(0, 3),
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
)
def test_sensitivities_are_steps_of_better_scenarios(
    forward_s: list[float], bandwidth_bps: float, latency_s: float, schedule: str
) -> None:
    scenario = chain_scenario(
        forward_s, [2 * each for each in forward_s], bandwidth_bps=bandwidth_bps, latency_s=latency_s
    )
    plan = chain_plan(scenario, schedule=schedule)
    of, step_s = sensitivity_of(plan, scenario), step_time_s(plan, scenario)

    def saved(better: Scenario) -> float:
        return 1 - step_time_s(plan, better) / step_s

    first = frozenset(("region-0", "region-1"))
    assert of.link_gain() == pytest.approx(saved(with_better_links(scenario, BETTER)), abs=1e-12)
    assert of.link_gain({first}) == pytest.approx(saved(_first_link(scenario, BETTER, 1.0)), abs=1e-12)
    assert of.latency_gain({first}) == pytest.approx(saved(_first_link(scenario, 1.0, 1 / BETTER)), abs=1e-12)
    quicker = dict.fromkeys(plan.devices, 1 / BETTER)
    assert of.compute_gain() == pytest.approx(1 - step_time_s(plan, scenario, slowdown=quicker) / step_s, abs=1e-12)
    assert of.sums_gain() == of.sums_share() == 0


def _first_link(scenario: Scenario, rate_ratio: float, latency_ratio: float) -> Scenario:
    """The scenario with other links between the first two regions, changed by hand."""
    links = tuple(
        replace(link, bandwidth_bps=rate_ratio * link.bandwidth_bps, latency_s=latency_ratio * link.latency_s)
        if {link.source, link.target} == {"region-0", "region-1"}
        else link
        for link in scenario.cluster.links
    )
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))


def test_sums_are_all_that_faster_links_change_where_nothing_else_travels() -> None:
    scenario, plan = bound_by_sums()
    of, step_s = sensitivity_of(plan, scenario), step_time_s(plan, scenario)
    better_s = step_time_s(plan, with_better_links(scenario, BETTER, 1 / BETTER))
    assert of.sums_gain() == pytest.approx(1 - better_s / step_s)
    # The three compute two samples each for 0.3 s a sample; a ring of three sends 4/3 of the gradients.
    assert of.sums_share() == pytest.approx(1 - 0.6 / step_s)
    assert of.link_gain() == of.latency_gain() == 0


def test_memory_is_a_matter_of_depth() -> None:
    scenario, plan = bound_by_memory()
    explanation = explain(plan, scenario)
    stage = explanation.pipelines[0].stages[0]
    deeper = chain_plan(scenario, depths=[stage.hiding_depth, 1])
    assert stage.hiding_depth > 2
    roomy = replace(
        scenario,
        cluster=Cluster(
            tuple(replace(device, memory_bytes=10**6) for device in scenario.cluster.devices), scenario.cluster.links
        ),
    )
    gain = 1 - step_time_s(deeper, roomy) / step_time_s(plan, scenario)
    assert explanation.verdict.shorter_share == pytest.approx(gain)
    assert explain(plan, roomy).verdict.cause == "latency"


def test_flows_that_share_a_link_can_fill_it_more_than_once() -> None:
    # Two pairs of neighbours cross the same link between two regions: each believes to have it alone.
    scenario = mesh_scenario(
        4, [0.1] * 2, [0.2] * 2, output_bytes=[10_000, 0], global_batch=16, regions=["a", "a", "b", "b"]
    )
    links = (Link("a", "b", 1e5, 1e-3), Link("b", "a", 1e5, 1e-3), Link("a", "a", 1e9, 0.0), Link("b", "b", 1e9, 0.0))
    shared = replace(scenario, cluster=Cluster(scenario.cluster.devices, links))
    plan = layered_plan(shared, [([(1, 2, 8), (2, 2, 8)], [2] * 8)], schedule="gpipe")
    shares = link_busy_shares(sensitivity_of(plan, shared), sums=False)
    # Eight microbatches of two samples of 10 kB, 80 kbit: 12.8 s at 100 kbit/s, forwards.
    assert shares == {frozenset("ab"): pytest.approx(12.8 / step_time_s(plan, shared))}
    assert shares[frozenset("ab")] > 0.7
    for boundary in explain(plan, shared).pipelines[0].boundaries:
        assert boundary.busy_share == pytest.approx(shares[frozenset("ab")] / 2)


def test_alike_pipelines_are_told_once() -> None:
    scenario = mesh_scenario(4, [1.0] * 2, [2.0] * 2, global_batch=8)
    plan = layered_plan(scenario, [([(1, 1, 2), (2, 1, 1)], [1] * 4)] * 2)
    explanation: Explanation = explain(plan, scenario)
    assert [loads.pipelines for loads in explanation.pipelines] == [(0, 1)]
    assert "pipeline 0 and 1 alike" in str(explanation)


def test_what_most_windows_reach_is_told_if_asked_for() -> None:
    scenario, plan = bound_by_link()
    assert explain(plan, scenario).robust is None
    explanation = explain(plan, scenario, 0.1)
    assert explanation.robust is not None
    assert explanation.robust.samples_per_s == pytest.approx(explanation.samples_per_s)
    assert "in 90 % of 1 windows" in str(explanation)


def test_what_a_stage_gives_its_own_sums_is_no_transfer_between_stages() -> None:
    scenario = choose_scenario("two-regions")
    explanation = explain(make_plan("cannikin", scenario), scenario)
    assert [loads.boundaries for loads in explanation.pipelines] == [()]


def test_devices_without_layers_are_named() -> None:
    scenario, plan = bound_by_compute()
    spare = replace(scenario.cluster.devices[0], name="spare")
    cluster = replace(scenario.cluster, devices=(*scenario.cluster.devices, spare))
    explanation = explain(plan, replace(scenario, cluster=cluster))
    assert explanation.unused_devices == ("spare",)
    assert "unused devices: spare" in str(explanation)


def test_a_saving_of_nothing_is_said_in_words() -> None:
    scenario = choose_scenario("cloud-edge-end")
    sentence = explain(make_plan("ddp", scenario), scenario).verdict.sentence
    assert "would hardly help there alone, but everywhere make the step 13 % shorter" in sentence


def test_the_bytes_of_a_parameter_are_said_with_their_source() -> None:
    scenario, plan = bound_by_compute()
    assert "8 bytes a parameter with its training state (parameter 4, gradient 4; torch" in str(explain(plan, scenario))
    stated = replace(scenario, training=replace(scenario.training, bytes_per_parameter=6.5))
    explanation = explain(plan, stated)
    assert "6.5 bytes a parameter with its training state (given in the scenario)" in str(explanation)
    memory = [each.pipelines[0].stages[0].memory_bytes for each in (explain(plan, scenario), explanation)]
    assert memory[1] < memory[0]


@pytest.mark.parametrize("first", [0, 1])
def test_the_link_of_any_replica_may_have_the_longest_latency(first: int) -> None:
    scenario = mesh_scenario(3, [0.1] * 4, [0.2] * 4, regions=["a", "b", "a"], global_batch=16)
    devices = scenario.cluster.devices
    links = tuple(Link(one, other, 1e9, 0.05 if one != other else 1e-4) for one in "ab" for other in "ab")
    scenario = replace(scenario, cluster=Cluster(devices, links))
    replicas = tuple(Replica(f"device-{number}") for number in (first, 1 - first))
    stages = (Stage(0, 2, replicas, 1), Stage(2, 4, (Replica("device-2"),), 1))
    plan = layered_plan(scenario, [([(4, 1, 1)], [2] * 8)])
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))
    assert longest_latency_link(sensitivity_of(plan, scenario)) == frozenset("ab")
