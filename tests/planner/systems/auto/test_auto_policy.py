"""The policy on links whose course is known: what the best plan is can be said beforehand."""

from dataclasses import replace

import pytest

from experiments.benches.fidelity.planned import DEPARTED
from experiments.benches.fidelity.stages import pipeline_case
from planner.adapt.observation import Observation
from planner.events.event import Event, EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Link
from planner.scenario.faults import Absence
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.step.orders import with_schedule
from planner.systems.auto.forecasting.prediction_error import PredictionBias
from planner.systems.auto.forecasting.probing import probing_plan
from planner.systems.auto.policy import AutoPolicy
from planner.systems.auto.portfolio import planned
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.scenarios.groups import group, layer, scenario_of
from tests.helpers.scenarios.wide import LAYERS, NOMINAL_BPS, on_one_device, wide_scenario
from traces.common.errors import InputError
from traces.trace import LinkTrace


def run(scenario: Scenario, plan: Plan, policy: str, duration_s: float) -> RunRecord:
    return Simulator(duration_s=duration_s).run(scenario, plan, make_policy(policy, scenario), 10**6)


def per_s(record: RunRecord) -> float:
    return measure(record).samples_per_s


def test_a_link_that_stays_as_declared_changes_nothing() -> None:
    scenario = wide_scenario()
    start = planned(scenario)
    assert len(start.devices) == 2
    adapted = run(scenario, start, "auto", 300.0)
    assert not any(decision.migration.moves for decision in adapted.decisions)
    assert per_s(adapted) >= 0.98 * per_s(run(scenario, start, "none", 300.0))


def test_tensor_parallel_groups_stay_where_they_are_when_a_link_falls() -> None:
    """A run cannot form groups anew; other plans would be several times as fast."""
    works = [layer(f"layer-{index}", "block", 4096) for index in range(6)]
    made = scenario_of(works, 2, inside=Link("", "", 1e12, 0.0), most=2)
    falls = LinkTrace((0.0, 5.0), (2e9, 2e6), 4000.0)
    links = tuple(replace(link, trace=falls) if link.bandwidth_bps < 1e12 else link for link in made.cluster.links)
    scenario = replace(made, cluster=Cluster(made.cluster.devices, links))
    replicas = tuple(replace(group(host, 2), share=0.5) for host in range(2))
    pipeline = Pipeline((Stage(0, len(works), replicas, 1),), (8,))
    plan = Plan(scenario.name, scenario.model.name, "test", "1f1b", (pipeline,))
    adapted = run(scenario, plan, "auto", 60.0)
    assert {each.pipelines[0].stages[0].replicas for each in [plan, *(one.plan for one in adapted.decisions)]} == {
        replicas
    }


@pytest.mark.slow
def test_a_link_that_falls_for_good_is_left_if_the_run_is_long_enough_for_the_move_to_pay() -> None:
    scenario = wide_scenario((0.0, NOMINAL_BPS), (30.0, NOMINAL_BPS / 40))
    start = planned(scenario)
    adapted, again, short = (run(scenario, start, "auto", duration_s) for duration_s in (400.0, 400.0, 150.0))
    assert per_s(adapted) > 1.5 * per_s(run(scenario, start, "none", 400.0))
    assert len(adapted.decisions[-1].plan.devices) == 1
    assert again.decisions == adapted.decisions
    moved = next(each.observed_step for each in adapted.decisions if each.migration.moves)
    assert moved < measure(short).steps
    assert not any(decision.migration.moves for decision in short.decisions)


def test_an_order_that_swaying_links_upset_is_given_up() -> None:
    swaying = [(2.0 * number, NOMINAL_BPS * (1.8 if number % 2 else 0.2)) for number in range(600)]
    scenario = wide_scenario(*swaying)
    start = with_schedule(planned(wide_scenario()), wide_scenario(), "compact-zb")
    assert (start.order, len(start.devices)) == ("scheduled", 2)
    adapted = run(scenario, start, "auto", 400.0)
    assert adapted.decisions[0].plan.order == "dynamic"
    assert per_s(adapted) > 1.02 * per_s(run(scenario, start, "none", 400.0))


@pytest.mark.parametrize(("error", "changes"), [(0.0, True), (0.09, False)])
def test_a_free_change_to_a_new_plan_gains_more_than_such_plans_were_slower_than_predicted(
    error: float, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    swaying = [(2.0 * number, NOMINAL_BPS * (1.8 if number % 2 else 0.2)) for number in range(200)]
    scenario = wide_scenario(*swaying)
    start = with_schedule(planned(wide_scenario()), wide_scenario(), "compact-zb")
    monkeypatch.setattr(PredictionBias, "error_of_new", error)
    assert bool(run(scenario, start, "auto", 200.0).decisions) == changes


def test_a_short_fall_is_sat_out() -> None:
    scenario = wide_scenario((0.0, NOMINAL_BPS), (40.0, NOMINAL_BPS / 4), (55.0, NOMINAL_BPS))
    start = planned(scenario)
    adapted = run(scenario, start, "auto", 520.0)
    assert not any(decision.migration.moves for decision in adapted.decisions)


def test_a_link_out_of_sight_is_looked_at_and_taken_up() -> None:
    scenario = wide_scenario()
    start = on_one_device(scenario)
    adapted = run(scenario, start, "auto", 700.0)
    assert len(adapted.decisions[-1].plan.devices) == 2
    assert per_s(adapted) > 1.3 * per_s(run(scenario, start, "none", 700.0))


def test_a_link_with_far_less_than_its_rate_is_known_without_moving_layers() -> None:
    scenario = wide_scenario((0.0, NOMINAL_BPS / 20))
    assert not run(scenario, on_one_device(scenario), "auto", 900.0).decisions


@pytest.mark.slow
def test_looking_in_vain_costs_little() -> None:
    scenario = wide_scenario((0.0, NOMINAL_BPS / 8))
    start = on_one_device(scenario)
    adapted = run(scenario, start, "auto", 3600.0)
    assert adapted.decisions
    assert per_s(adapted) >= 0.98 * per_s(run(scenario, start, "none", 3600.0))


def test_a_run_too_short_for_a_probe_to_pay_keeps_its_plan() -> None:
    """In the run of 700 s above, the same link is probed and taken up from the same start."""
    scenario = wide_scenario()
    start = on_one_device(scenario)
    assert not run(scenario, start, "auto", 240.0).decisions


def with_latencies(scenario: Scenario, rises_s: float, latency_s: float) -> Scenario:
    """Return the scenario with a latency that all links have from ``rises_s`` seconds on, in place of the declared."""
    links = tuple(
        replace(
            link,
            trace=LinkTrace([0.0, rises_s], [link.bandwidth_bps] * 2, 1e5, [link.latency_s, latency_s]),  # type: ignore[arg-type]
        )
        for link in scenario.cluster.links
    )
    return replace(scenario, cluster=replace(scenario.cluster, links=links))


def test_a_latency_far_above_the_declared_one_is_known_without_moving_layers() -> None:
    scenario = with_latencies(wide_scenario(), 1.0, 20.0)
    assert not run(scenario, on_one_device(scenario), "auto", 900.0).decisions


@pytest.mark.slow
def test_a_probe_that_meets_a_latency_far_above_the_known_one_ends_after_a_step() -> None:
    declared = wide_scenario()
    start = on_one_device(declared)
    probed_s = next(event.start_s for event in run(declared, start, "auto", 700.0).events if is_decision(event))
    scenario = with_latencies(declared, probed_s + 1.0, 20.0)
    adapted = run(scenario, start, "auto", 3600.0)
    probe, back = adapted.decisions
    assert (back.observed_step, back.plan.pipelines) == (probe.first_step, start.pipelines)
    assert per_s(adapted) >= 0.975 * per_s(run(scenario, start, "none", 3600.0))


def is_decision(event: Event) -> bool:
    return event.kind is EventKind.DECISION


def test_probing_moves_one_layer_over_the_link() -> None:
    scenario = wide_scenario()
    scouting = probing_plan(on_one_device(scenario), scenario, {"region-0->region-1"}, ())
    assert scouting is not None
    ends = [(stage.replicas[0].device, stage.end_layer) for stage in scouting.pipelines[0].stages]
    assert ends == [("device-0", LAYERS - 1), ("device-1", LAYERS)]
    assert probing_plan(on_one_device(scenario), scenario, {"region-0->region-1"}, ("device-1",)) is None


@pytest.mark.parametrize("name", ["planned", "one"])
def test_plans_keep_the_batch(name: str) -> None:
    scenario = wide_scenario((0.0, NOMINAL_BPS / 20))
    start = planned(scenario) if name == "planned" else on_one_device(scenario)
    assert {decision.plan.global_batch for decision in run(scenario, start, "auto", 400.0).decisions} <= {16}


def finds_nothing(scenario: Scenario, away: frozenset[str]) -> tuple[Plan, float]:
    raise InputError("no split fits", valid="another model")


def test_of_equally_fast_plans_the_one_within_reach_answers_a_departure() -> None:
    """Predictions of both are equal; the one that was found first would move all layers but those in the middle."""
    made = pipeline_case("departed", "", DEPARTED, (4,) * 5, [5, 3, 1], "1f1b")
    gone = ("gpu-1-0-1",)

    def on(*devices: str) -> Plan:
        (pipeline,) = made.plan.pipelines
        stages = tuple(
            replace(stage, replicas=(Replica(device),)) for stage, device in zip(pipeline.stages, devices, strict=True)
        )
        return replace(made.plan, pipelines=(replace(pipeline, stages=stages, microbatches=(1,) * 20),))

    far, near = on("gpu-2-0-0", "gpu-1-0-0", "gpu-0-0-0"), on("gpu-0-0-0", "gpu-1-0-0", "gpu-2-0-0")
    policy = AutoPolicy(made.scenario, finds_nothing)
    for plan in (made.plan, far, near):
        policy.portfolio.add(plan)
    assert step_time_s(far, made.scenario) == pytest.approx(step_time_s(near, made.scenario))
    answer = policy.decide(Observation(0, made.plan, (), (), gone=gone, away=gone), made.plan)
    assert answer is not None
    assert answer.pipelines == near.pipelines


@pytest.mark.slow
def test_a_device_of_the_same_region_that_returns_is_used_again() -> None:
    """Links between hosts of one region cannot be probed: as long as no step uses them, they count as declared."""
    scenario = mesh_scenario(
        3, [0.1] * 3, [0.2] * 3, link=lambda a, b: (1e9, 0.001), global_batch=12, regions=["here"] * 3
    )
    scenario = replace(scenario, faults=(Absence("device-2", 20.0, 140.0),))
    record = run(scenario, planned(scenario), "auto", 300.0)
    assert [len(decision.plan.devices) for decision in record.decisions] == [2, 3]


@pytest.mark.parametrize(("leaves_s", "returns_s"), [(0.5, 3.0), pytest.param(30.0, 90.0, marks=pytest.mark.slow)])
def test_the_first_plan_goes_on_soon_after_its_device_is_back(leaves_s: float, returns_s: float) -> None:
    """As without a policy: whether the links were seen before or not, and without a probe first."""
    scenario = wide_scenario()
    start = planned(scenario)
    scenario = replace(scenario, faults=(Absence(start.devices[1], leaves_s, returns_s),))
    adapted = run(scenario, start, "auto", 400.0)
    assert [decision.plan.devices for decision in adapted.decisions] == [start.devices[:1], start.devices]
    assert per_s(adapted) > 0.98 * per_s(run(scenario, start, "none", 400.0))


@pytest.mark.parametrize(("leaves_s", "returns_s"), [pytest.param(10.0, 100.0, marks=pytest.mark.slow), (60.0, 100.0)])
def test_an_absence_that_is_waited_out_does_not_make_the_plan_look_slow(leaves_s: float, returns_s: float) -> None:
    """One device alone takes 11 % longer for a step; with both away there is nothing to do but wait."""
    scenario = wide_scenario()
    links = tuple(replace(link, bandwidth_bps=NOMINAL_BPS / 12) for link in scenario.cluster.links)
    scenario = replace(scenario, cluster=replace(scenario.cluster, links=links))
    start = planned(scenario)
    assert step_time_s(start, scenario) < step_time_s(on_one_device(scenario), scenario)
    assert not run(scenario, start, "auto", 400.0).decisions
    away = tuple(Absence(device, leaves_s, returns_s) for device in start.devices)
    assert not run(replace(scenario, faults=away), start, "auto", 400.0).decisions


@pytest.mark.parametrize("policy", ["auto", "cloudless", "heavy-rescheduling"])
def test_what_only_an_absent_device_holds_is_waited_for(policy: str) -> None:
    """The other device could train the model, but nobody has its layers until the first one is back."""
    scenario = mesh_scenario(2, [0.1] * 4, [0.2] * 4, link=lambda a, b: (1e9, 0.001), global_batch=4)
    scenario = replace(scenario, faults=(Absence("device-0", 2.0, 5.0),))
    plan = layered_plan(scenario, [([(4, 1, 1)], [2, 2])])
    assert plan.devices == ("device-0",)
    assert measure(Simulator().run(scenario, plan, make_policy(policy, scenario), 6)).steps == 6
