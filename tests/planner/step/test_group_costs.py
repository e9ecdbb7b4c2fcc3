"""Costs of tensor-parallel groups that several parts of the planner compute, against simulated steps."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.network import nominal_path
from planner.cost.synchronisation import gradient_syncs, update_edges
from planner.events.event import EventKind
from planner.plan.plan import Pipeline, Plan, Stage, Synchronisation
from planner.runs.metrics import measure
from planner.scenario.cluster import Link
from planner.scenario.profile import NO_SUMS
from planner.scenario.scenario import Scenario
from planner.scenario.sharding import Sharding, named_sharding
from planner.scenario.size_curve import SizeCurve
from planner.scenario.training import Training
from planner.schedules.kernel.problem import BACKWARD
from planner.step.compile import compile_step, planned_compute_s
from planner.step.evaluate import step_time_s
from planner.step.orders import with_schedule
from planner.step.shared_links.step_time import shared_step_time_s
from planner.systems.asteroid.policy import in_proportion, replay
from planner.systems.auto.candidates.build import plan_of as build_plan
from planner.systems.auto.candidates.device_classes import DeviceClass, StageOption, device_classes_of
from planner.systems.auto.candidates.mixed import find_mixes
from planner.systems.auto.candidates.option_costs import option_costs
from planner.systems.auto.candidates.templates import TemplateStage, gradient_sum_s
from planner.systems.cannikin.step_model import sum_time_s
from sim.simulator import Simulator
from tests.helpers.scenarios.groups import group, layer, scenario_of

SLOW = Link("", "", 8e6, 0.002)


def plan_of(scenario: Scenario, *pipelines: Pipeline) -> Plan:
    return Plan(scenario.name, scenario.model.name, "hand", "1f1b", pipelines)


def sharded_scenario(hosts: int, replicated_parameter_bytes: int = 0, inside: Link | None = None) -> Scenario:
    work = layer("block", "block", 4096)
    assert work.sharding is not None
    sharding = replace(
        named_sharding("block", 4096, 4096, 40_000), replicated_parameter_bytes=replicated_parameter_bytes
    )
    works = [layer("first", "vocabulary", 0, first=True), replace(work, sharding=sharding)]
    return scenario_of(works, hosts, inside=inside)


def full_hosts(scenario: Scenario, devices: int) -> DeviceClass:
    """Return the devices as a class whose hosts have no more devices than a group."""
    (device_class,) = device_classes_of(scenario.cluster)
    return replace(device_class, hosts=tuple(host[:devices] for host in device_class.hosts))


@settings(max_examples=30)
@given(st.integers(2, 4), st.sampled_from([1, 2, 4]), st.sampled_from([0, 48_000]))
def test_the_search_sums_as_many_bytes_as_the_step(hosts: int, degree: int, whole_bytes: int) -> None:
    scenario = sharded_scenario(hosts, whole_bytes)
    scenario = replace(scenario, training=Training(hosts))
    plan = plan_of(scenario, *(Pipeline((Stage(0, 2, (group(host, degree),), 1),), (1,)) for host in range(hosts)))
    (sync,) = gradient_syncs(plan, scenario)
    alone_s = sum_time_s(sync, lambda one, other: nominal_path(scenario, one, other))
    # All hops share the region's network.
    judged_s = shared_step_time_s(plan, scenario) - step_time_s(plan, scenario) + alone_s
    device_class = full_hosts(scenario, degree)
    option = StageOption(device_class, degree, 1, recompute=False, most_stages=1)
    # The elements of a part are rounded in the step.
    assert gradient_sum_s(TemplateStage(option, 0, 2), scenario, hosts) == pytest.approx(judged_s, rel=1e-3)
    costs = option_costs([option], scenario, hosts, 1, 1.0, inf)
    assert costs.sum_s[0, -1] == pytest.approx(judged_s, rel=1e-3)


@settings(max_examples=20)
@given(st.integers(2, 4), st.sampled_from([1, 2, 4]), st.sampled_from([8e6, 100e6]))
def test_shards_cross_the_network_side_by_side(hosts: int, degree: int, bandwidth_bps: float) -> None:
    curve = SizeCurve(0.0, 1e-4, 1e-3, 10e6)
    scenario = sharded_scenario(hosts)
    links = [replace(link, bandwidth_bps=bandwidth_bps, size_curve=curve) for link in scenario.cluster.links[:1]]
    cluster = replace(scenario.cluster, links=(*links, *scenario.cluster.links[1:]))
    scenario = replace(scenario, cluster=cluster, training=Training(hosts))
    plan = plan_of(scenario, *(Pipeline((Stage(0, 2, (group(host, degree),), 1),), (1,)) for host in range(hosts)))
    (sync,) = gradient_syncs(plan, scenario)
    shard_bytes = -(-sync.elements // hosts) * 4
    message_s = max(8 * shard_bytes / curve.rate_bps(shard_bytes), 8 * degree * shard_bytes / bandwidth_bps)
    expected_s = 2 * (hosts - 1) * (message_s + 0.001)
    assert sum_time_s(sync, lambda *ends: nominal_path(scenario, *ends)) == pytest.approx(expected_s, rel=1e-3)
    option = StageOption(full_hosts(scenario, degree), degree, 1, recompute=False, most_stages=1)
    shared_s = 2 * (hosts - 1) * (hosts * 8 * degree * shard_bytes / bandwidth_bps + 0.001)
    expected_s = max(expected_s, shared_s)
    assert gradient_sum_s(TemplateStage(option, 0, 2), scenario, hosts) == pytest.approx(expected_s, rel=1e-3)
    simulated_s = measure(Simulator().run(scenario, plan, None, 1)).step_s
    assert shared_step_time_s(plan, scenario) == pytest.approx(simulated_s, rel=1e-6)


def test_mixes_count_every_shard() -> None:
    scenario = sharded_scenario(2)
    # A device has too little memory for a layer, so that groups must share them; devices of unlike prices are a mix.
    devices = tuple(
        replace(device, memory_bytes=790_000, price_per_hour=number // 4)
        for number, device in enumerate(scenario.cluster.devices)
    )
    scenario = replace(scenario, cluster=replace(scenario.cluster, devices=devices), training=Training(512))
    found = [mix for mix in find_mixes(device_classes_of(scenario.cluster), scenario) if len(mix.templates) > 1]
    assert found
    for mix in found:
        assert all(stage.option.degree > 1 for template in mix.templates for stage in template.stages)
        plan = build_plan(mix.templates, scenario, "hand")
        assert plan is not None
        sums_s = [
            sum_time_s(sync, lambda one, other: nominal_path(scenario, one, other))
            for sync in gradient_syncs(plan, scenario)
        ]
        assert mix.step_s - max(each.pipeline_s for each in mix.templates) >= 0.99 * max(sums_s)


@settings(max_examples=20)
@given(st.sampled_from(["asgd", "asgd-ga", "ma"]), st.tuples(*[st.sampled_from([1, 2, 4])] * 2))
def test_an_update_carries_every_shard(method: str, degrees: tuple[int, int]) -> None:
    scenario = replace(sharded_scenario(2), training=Training(2))
    how = Synchronisation(method, interval_steps=1 if method == "asgd" else 2)
    pipelines = [
        Pipeline((Stage(0, 2, (group(host, degree),), 1),), (1,)) for host, degree in zip((0, 1), degrees, strict=True)
    ]
    plan = replace(plan_of(scenario, *pipelines), synchronisation=how)
    # No parameter of these layers is whole on every device, so that the shards are the model.
    whole_bytes = scenario.model.parameter_bytes(0, 2)
    assert [each.size_bytes for each in update_edges(plan, scenario)] == [whole_bytes] * 2
    record = Simulator().run(scenario, plan, None, 2)
    sent = {event.size_bytes for event in record.events if event.kind is EventKind.SEND}
    assert sent == {whole_bytes}


@settings(max_examples=20)
@given(st.lists(st.sampled_from([1, 2, 4]), min_size=3, max_size=3), st.integers(1, 4))
def test_replay_knows_a_group_by_its_speed(degrees: list[int], samples: int) -> None:
    scenario = replace(sharded_scenario(3, inside=SLOW), training=Training(samples))
    layers = [(0, 1), (1, 2)]
    stages = [Stage(*layers[0], (group(0, degrees[0]),), 2)]
    stages.append(Stage(*layers[1], (group(1, degrees[1]), group(2, degrees[2])), 1))
    plan = plan_of(scenario, Pipeline(tuple(stages), (max(2, samples),)))
    known: list[Sequence[float]] = []

    def rule(left: Sequence[Stage], until_s: Sequence[float], capacities: Sequence[float]) -> list[int]:
        known.append(capacities)
        return in_proportion(left, until_s, capacities)

    replay(plan, scenario, [group(2, degrees[2]).device], rules=(rule,))
    count = max(2, samples)

    def speed(host: int) -> float:
        alone = plan_of(scenario, Pipeline((Stage(0, 2, (group(host, degrees[host]),), 1),), (count,)))
        return count / step_time_s(alone, replace(scenario, training=Training(count)))

    assert known == [pytest.approx([speed(0), speed(1)])]
    assert inf not in known[0]


def silent_scenario(layers: int, hosts: int, inside: Link | None) -> Scenario:
    """A scenario in which a group shares layers without sums, so that only received messages pass through it."""
    work = replace(layer("", "row", 4096), sharding=Sharding(0, 0, 0, NO_SUMS, NO_SUMS))
    works = [replace(work, name=f"layer-{number}", output_bytes=2048 + 512 * number) for number in range(layers)]
    return scenario_of(works, hosts, inside=inside)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 1), min_size=2, max_size=6),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_a_group_passes_on_what_it_has_received_and_nothing_else(places: list[int], microbatches: list[int]) -> None:
    free, slow = (
        replace(silent_scenario(len(places), 2, inside), training=Training(sum(microbatches)))
        for inside in (None, SLOW)
    )
    stages = tuple(Stage(at, at + 1, (group(place, 4),), 9) for at, place in enumerate(places))
    # A schedule for stages in any places.
    plan = replace(plan_of(free, Pipeline(stages, tuple(microbatches))), schedule="compact-zb")
    events = Simulator().run(slow, plan, None, 1).events
    for name in plan.devices:
        received = [each.size_bytes for each in events if each.kind is EventKind.SEND and each.peer == name]
        passing_s = sum(3 * 0.002 + size_bytes / 1e6 for size_bytes in received)
        without_s, with_s = (planned_compute_s(plan, each).get(name, 0.0) for each in (free, slow))
        assert with_s - without_s == pytest.approx(passing_s, abs=1e-9)


def test_zb_v_turns_on_a_device_without_a_message() -> None:
    free, slow = (replace(silent_scenario(4, 2, inside), training=Training(4)) for inside in (None, SLOW))
    halves = [Stage(0, 2, (group(0, 4),), 2), Stage(2, 4, (group(1, 4),), 1)]
    plan = with_schedule(plan_of(slow, Pipeline(tuple(halves), (1,) * 4)), slow, "zb-v")
    assert [stage.replicas[0].device for stage in plan.stages] == ["host-0-0", "host-1-0", "host-1-0", "host-0-0"]
    # The turning device receives the first boundary, and the gradient of the third: 2048 and 3072 bytes a sample.
    passing_s = 4 * (2 * 3 * 0.002 + (2048 + 3072) / 1e6)
    without_s, with_s = (planned_compute_s(plan, each)["host-1-0"] for each in (free, slow))
    assert with_s - without_s == pytest.approx(passing_s)


def test_a_bucket_is_ready_before_the_layers_below_it_whatever_was_received() -> None:
    free, slow = (replace(silent_scenario(4, 4, inside), training=Training(2)) for inside in (None, SLOW))
    pipelines = [
        Pipeline((Stage(0, 3, (group(host, 4),), 2), Stage(3, 4, (group(host + 1, 4),), 1)), (1,)) for host in (0, 2)
    ]
    plan = replace(plan_of(free, *pipelines), synchronisation=Synchronisation(bucket_bytes=1))
    below_s = []
    for scenario in (free, slow):
        actions = compile_step(plan, scenario).actions
        segments_s = actions.duration_s[(actions.actor == 0) & (actions.kind == BACKWARD)].tolist()
        # One segment for each layer; the first also passes on the gradient that the group has received.
        assert segments_s[3:] == [0.0]
        below_s.append(segments_s[1:])
    assert below_s[0] == pytest.approx(below_s[1])
