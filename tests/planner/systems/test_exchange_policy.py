"""The policy ``auto`` for workers that take outer steps: by the law of the loss it trains further in the same time."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from executor.backend import TorchBackend
from planner.adapt.policy import Policy
from planner.check import check_plan
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster
from planner.scenario.convergence import SHAPE, TERMS, LossLaw
from planner.scenario.scenario import Scenario
from planner.systems.regional.loss_plan import STREAMING, mode_of
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from tests.planner.systems.test_streaming_policy import slowed
from tests.sim.test_outer_steps import BYTES_PER_S, regions
from traces.trace import LinkTrace

PRICES = {"outer steps": 0.05, "interval": 0.08, "streaming": 0.02, "compression": 0.03}
POINT = (*(0.0 for _ in SHAPE), *(PRICES.get(term, 0.0) for term in TERMS))
LAW = LossLaw("made up", 1.0, POINT, (POINT,), (STREAMING,), ("none", "int8", "int4"), 200, 2)


def with_law(scenario: Scenario) -> Scenario:
    return replace(scenario, training=replace(scenario.training, convergence=LAW))


DURATION_S = 600.0


def progress(scenario: Scenario, plan: Plan, policy: Policy | None) -> float:
    """By how many steps with sums of gradients a run of `DURATION_S` comes nearer to the loss, by the law."""
    return progress_of(Simulator(duration_s=DURATION_S).run(scenario, plan, policy, 10**6))


def progress_of(record: RunRecord) -> float:
    """The same of a run that has ended; all its plans are valid."""
    steps = measure(record).steps
    plans = [record.plan] * steps
    for decision in record.decisions:
        check_plan(decision.plan, record.scenario)
        plans[decision.first_step :] = [decision.plan] * (steps - decision.first_step)
    return sum(1 / LAW.price(mode_of(each)) for each in plans)


def stepwise(shares: Sequence[tuple[float, float]]) -> LinkTrace:
    """A trace of seconds and shares of the rate at which a layer's pseudo-gradients take the time of `regions`."""
    starts = [sum(seconds for seconds, _ in shares[:number]) for number in range(len(shares))]
    return LinkTrace([0.0, *starts[1:]], [8.0 * BYTES_PER_S * share for _, share in shares], 1e6)


def course(interval: int, factors: list[tuple[float, float]]) -> tuple[Scenario, Plan]:
    """Two workers with steps of 1 s, and links with rates for some seconds, as shares of one that hides exchanges."""
    outer = OuterStep(fragments=min(2, interval), pattern="strided", overlap_steps=min(1, interval - 1), mixing=0.5)
    scenario, plan = regions([1.0, 1.0], [0.5, 0.5], interval, outer)
    links = tuple(replace(link, trace=stepwise(factors)) for link in scenario.cluster.links)
    return with_law(replace(scenario, cluster=Cluster(scenario.cluster.devices, links))), plan


RATES = st.lists(st.tuples(st.floats(5, 300), st.floats(1 / 64, 4)), min_size=1, max_size=5)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.sampled_from([2, 5, 20]), RATES)
@example(2, [(40.0, 1.0), (160.0, 1 / 8), (600.0, 1.0)])
@example(2, [(40.0, 1.0), (360.0, 1 / 50), (600.0, 1.0)])
@example(20, [(600.0, 1.0)])
def test_no_course_of_a_link_costs_much(interval: int, factors: list[tuple[float, float]]) -> None:
    scenario, plan = course(interval, factors)
    assert progress(scenario, plan, make_policy("auto", scenario)) >= 0.95 * progress(scenario, plan, None)


@pytest.mark.parametrize("share", [1 / 8, 1 / 50])
def test_a_slow_link_is_answered_with_compression_and_intervals(share: float) -> None:
    scenario, plan = course(5, [(40.0, 1.0), (300.0, share), (1000.0, 1.0)])
    kept, streaming, auto = (
        progress(scenario, plan, None if name is None else make_policy(name, scenario))
        for name in (None, "streaming", "auto")
    )
    assert auto >= 1.3 * kept
    assert auto >= streaming


def test_plans_that_the_law_does_not_know_are_left_alone() -> None:
    scenario, plan = slowed(1.0, (20.0, 1000.0), 0.125)
    known = with_law(scenario)
    sparse = replace(plan.synchronisation, outer=replace(plan.synchronisation.outer, density=0.1))
    for one, other in ((scenario, plan), (known, replace(plan, synchronisation=sparse))):
        assert not Simulator().run(one, other, make_policy("auto", one), 60).decisions
    assert Simulator().run(known, plan, make_policy("auto", known), 60).decisions


def test_a_real_run_takes_the_same_decision() -> None:
    # With an eighth of the rate int8 would just be hidden, and chosen if a step is measured a little longer.
    scenario, plan = slowed(0.1, (1.0, 1000.0), 0.1)
    scenario = with_law(scenario)
    real = TorchBackend("paced", emulator="shaper").run(scenario, plan, make_policy("auto", scenario), 24)
    simulated = Simulator().run(scenario, plan, make_policy("auto", scenario), 24)
    assert first_choice(real) == first_choice(simulated)


def first_choice(record: RunRecord) -> tuple[int, str]:
    how = record.decisions[0].plan.synchronisation
    return how.interval_steps, how.outer.compression
