"""Policies for outer steps go on without workers whose devices are away, and take them back."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan, Replica
from planner.runs.event_totals import step_ends_s
from planner.runs.metrics import measure
from planner.scenario.effects import ComputeEffects, Slowdown
from planner.scenario.faults import DETECTION_S, Absence
from planner.scenario.scenario import Scenario
from planner.systems.regional.worker_shares import shared_out
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from tests.sim.test_outer_steps import regions


def workers(method: str, count: int = 4, samples: int = 3) -> tuple[Scenario, Plan]:
    """Workers with steps of a second, whose samples take a third of it each; exchanges take a tenth."""
    outer = OuterStep(fragments=2, overlap_steps=1) if method == "diloco-streaming" else OuterStep()
    scenario, plan = regions([1.0 / samples] * count, [0.05, 0.05], 5, outer, 0.01)
    pipelines = tuple(replace(each, microbatches=(1,) * samples) for each in plan.pipelines)
    scenario = replace(scenario, training=replace(scenario.training, global_batch=count * samples))
    how = replace(plan.synchronisation, method=method)
    return scenario, replace(plan, pipelines=pipelines, synchronisation=how)


@pytest.mark.parametrize(("method", "policy"), [("diloco", "auto"), ("diloco-streaming", "streaming")])
def test_others_train_while_a_worker_is_away(method: str, policy: str) -> None:
    """For 100 s three workers train the batch of four: 75 of its steps, less what one without them costs."""
    scenario, plan = workers(method)
    away = replace(scenario, faults=(Absence("device-1", 50.0, 150.0),))
    steps = [
        measure(Simulator(duration_s=200.0).run(each, plan, made, 10**6)).steps
        for each, made in ((scenario, None), (away, None), (away, make_policy(policy, away)))
    ]
    assert steps[1] < steps[0] - 90
    assert steps[2] > steps[1] + 60
    record = Simulator(duration_s=200.0).run(away, plan, make_policy(policy, away), 10**6)
    plans = [plan, *(decision.plan for decision in record.decisions)]
    changes = [after for before, after in pairwise(plans) if before.devices != after.devices]
    assert [each.devices for each in changes] == [("device-0", "device-2", "device-3"), plan.devices]
    assert [pipeline.samples for pipeline in changes[0].pipelines] == [4, 4, 4]


def test_a_replica_that_is_away_leaves_its_stage_to_the_others() -> None:
    """Only the loss of its first replica takes a worker out."""
    scenario, plan = workers("diloco", 3)
    first, second, _ = plan.pipelines
    (stage,) = first.stages
    replicas = (Replica("device-0"), Replica("device-2"))
    pipelines = (replace(first, stages=(replace(stage, replicas=replicas),), microbatches=(2, 2, 2)), second)
    plan = replace(plan, pipelines=pipelines)
    check_plan(plan, scenario)
    for gone, left in (("device-2", ("device-0", "device-1")), ("device-0", ("device-1",))):
        away = replace(scenario, faults=(Absence(gone, 20.0, 60.0),))
        record = Simulator().run(away, plan, make_policy("auto", away), 100)
        assert [decision.plan.devices for decision in record.decisions] == [left, plan.devices]


# A device, when it leaves, and for how long, seconds.
ABSENCES = st.tuples(st.integers(0, 3), st.floats(1, 40), st.floats(0.5, 20))


@pytest.mark.parametrize("method", [pytest.param("diloco", marks=pytest.mark.slow), "diloco-streaming"])
def test_a_replica_may_leave_while_exchanges_are_under_way(method: str) -> None:
    scenario, plan = workers(method, 3)
    first, second, _ = plan.pipelines
    replicas = (Replica("device-0"), Replica("device-2"))
    replicated = replace(first, stages=(replace(first.stages[0], replicas=replicas),), microbatches=(2, 2, 2))
    plan = replace(plan, pipelines=(replicated, second))
    for tenth in range(26):
        away = replace(scenario, faults=(Absence("device-2", 20 + tenth / 10, 60.0),))
        record = Simulator().run(away, plan, make_policy("auto", away), 60)
        assert measure(record).steps == 60


@settings(max_examples=30)
@given(
    st.integers(2, 4),
    st.lists(ABSENCES, min_size=1, max_size=3, unique_by=lambda absence: absence[0]),
    st.sampled_from(["diloco", "diloco-streaming"]),
    st.integers(0, 3),
)
@example(2, [(0, 1.0, 1.0), (1, 2.0, 1.0)], "diloco", 0)
def test_whoever_is_away_the_others_go_on_and_all_samples_are_trained(
    count: int, absences: list[tuple[int, float, float]], method: str, backup_every: int
) -> None:
    scenario, plan = workers(method, count)
    faults = tuple(Absence(f"device-{n}", at_s, at_s + for_s) for n, at_s, for_s in absences if n < count)
    away = replace(scenario, faults=faults)
    record = Simulator(backup_every=backup_every).run(away, plan, make_policy("auto", away), 60)
    totals = measure(record)
    assert totals.steps == 60
    for decision in record.decisions:
        check_plan(decision.plan, away)
        assert decision.plan.global_batch == plan.global_batch
    waited_s = sum(for_s for _, _, for_s in absences)
    unhurt_s = step_ends_s(Simulator().run(scenario, plan, None, 60).events)[-1]
    # Alone a worker takes ``count`` times as long; each absence and each return may lose what was under way.
    assert step_ends_s(record.events)[-1] < unhurt_s + count * waited_s + len(absences) * (DETECTION_S + 20)


@given(st.integers(1, 1000), st.lists(st.floats(0.01, 50), min_size=1, max_size=8))
def test_samples_are_shared_out_in_proportion(samples: int, weights: list[float]) -> None:
    shares = shared_out(samples, weights)
    exact = [samples * weight / sum(weights) for weight in weights]
    assert sum(shares) == samples
    assert samples < len(weights) or min(shares) >= 1
    if min(exact) >= 1:
        assert max(abs(share - each) for share, each in zip(shares, exact, strict=True)) < 1


@pytest.mark.parametrize(("method", "policy"), [("diloco", "auto"), ("diloco-streaming", "streaming")])
def test_a_device_that_becomes_slow_gets_fewer_samples(method: str, policy: str) -> None:
    """A step takes 1 s. When one of four devices takes twice as long, it takes 1.33 s with 2 of its 3 samples."""
    scenario, plan = workers(method)
    slow = Slowdown("device-1", (0.0, 50.0, 250.0), (1.0, 0.5, 1.0))
    slowed = replace(scenario, effects=replace(scenario.effects, compute=ComputeEffects(slowdowns=(slow,))))
    kept, shared = (
        Simulator(duration_s=400.0).run(slowed, plan, made, 10**6) for made in (None, make_policy(policy, slowed))
    )
    assert measure(kept).steps == pytest.approx(300 / (1 + 0.1 / 5), rel=0.05)
    assert measure(shared).steps > measure(kept).steps + 30
    shares = [[each.samples for each in decision.plan.pipelines] for decision in shared.decisions]
    assert [4, 2, 3, 3] in shares
    assert shares[-1] == [3, 3, 3, 3]
