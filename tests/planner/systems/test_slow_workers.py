"""The policy ``auto`` leaves out a worker behind slow links if they stay slow, and takes it back."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.backend import TorchBackend
from planner.check import check_plan
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan
from planner.runs.event_totals import step_ends_s
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster
from planner.scenario.faults import Absence
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from tests.planner.systems.test_exchange_policy import LAW, progress_of, stepwise
from tests.sim.test_outer_steps import regions

SAMPLES = 4


def one_behind(
    workers: int, rates: Sequence[tuple[float, float]], most_interval: int = 20, step_s: float = 1.0, behind: int = 1
) -> tuple[Scenario, Plan]:
    """Workers, and rates of all links of the last ``behind`` ones: (seconds, share of the others' rate).

    A fragment, one of two, takes half a step on the others. Messages are sent as they are.
    """
    outer = OuterStep(fragments=2, pattern="strided", overlap_steps=1, mixing=0.5)
    layers_s, every = [step_s / 2, step_s / 2], min(5, most_interval)
    scenario, plan = regions([step_s / SAMPLES] * workers, layers_s, every, outer, 0.01 * step_s)
    names = {*plan.devices[-behind:]}
    links = tuple(
        link if names.isdisjoint((link.source, link.target)) else replace(link, trace=stepwise(rates))
        for link in scenario.cluster.links
    )
    law = replace(LAW, most_interval=most_interval, compressions=("none",))
    training = replace(scenario.training, convergence=law, global_batch=workers * SAMPLES)
    plan = replace(plan, pipelines=tuple(replace(each, microbatches=(1,) * SAMPLES) for each in plan.pipelines))
    cluster = Cluster(scenario.cluster.devices, links)
    return replace(scenario, cluster=cluster, training=training), plan


def run(scenario: Scenario, plan: Plan, duration_s: float, *, adapts: bool = True) -> RunRecord:
    policy = make_policy("auto", scenario) if adapts else None
    record = Simulator(duration_s=duration_s).run(scenario, plan, policy, 10**6)
    for decision in record.decisions:
        check_plan(decision.plan, scenario)
        assert decision.plan.global_batch == plan.global_batch
    return record


def devices(record: RunRecord) -> list[int]:
    """The numbers of devices of a run's plans, one after the other."""
    counts = [len(record.plan.devices), *(len(decision.plan.devices) for decision in record.decisions)]
    return [count for place, count in enumerate(counts) if not place or count != counts[place - 1]]


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_worker_behind_lastingly_slow_links_is_left_out(workers: int) -> None:
    """With it, 20 steps wait 100 s for an exchange at a rate of 1/200."""
    scenario, plan = one_behind(workers, [(40.0, 1.0), (1e5, 1 / 200)])
    record = run(scenario, plan, 3000.0)
    assert devices(record)[:2] == [workers, workers - 1]
    left = next(each.plan.devices for each in record.decisions if len(each.plan.devices) < workers)
    # Of two workers each is behind the slow links.
    assert left == plan.devices[:-1] or workers == 2
    assert progress_of(record) > 6 * progress_of(run(scenario, plan, 3000.0, adapts=False))


def test_two_workers_behind_slow_links_are_left_out_together() -> None:
    """Without one of them alone, exchanges take as long."""
    scenario, plan = one_behind(5, [(40.0, 1.0), (1e5, 1 / 200)], behind=2)
    record = run(scenario, plan, 2500.0)
    assert devices(record)[:2] == [5, 3]
    assert next(each.plan.devices for each in record.decisions if len(each.plan.devices) == 3) == plan.devices[:3]


@pytest.mark.parametrize("slow", [0, 3])
def test_a_worker_that_is_slow_to_compute_is_not_left_out_for_its_paths(slow: int) -> None:
    scenario, plan = one_behind(4, [(1e5, 1.0)])
    kind = scenario.cluster.by_name[plan.devices[slow]].kind
    slower = tuple(
        replace(layer, times={**layer.times, kind: scaled(layer.times[kind], 10)}) for layer in scenario.model.layers
    )
    scenario = replace(scenario, model=replace(scenario.model, layers=slower))
    assert devices(run(scenario, plan, 2000.0)) == [4]


def scaled(table: TimeTable, factor: float) -> TimeTable:
    columns = (table.forward_s, table.backward_input_s, table.backward_weight_s)
    return TimeTable(table.samples, *(tuple(factor * each for each in times_s) for times_s in columns))


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_worker_that_is_left_out_does_not_stand_in_for_those_that_are_lost(workers: int) -> None:
    """It has no present parameters: the run waits."""
    scenario, plan = one_behind(workers, [(40.0, 1.0), (1e5, 1 / 200)])
    record = run(scenario, plan, 3000.0)
    left = next(each for each in record.decisions if len(each.plan.devices) < workers)
    gone_s = step_ends_s(record.events)[left.first_step + 20]
    faults = tuple(Absence(name, gone_s, gone_s + 50) for name in left.plan.devices)
    again = run(replace(scenario, faults=faults), plan, 3000.0)
    assert step_ends_s(again.events)[-1] > gone_s + 100


@pytest.mark.parametrize("slow_s", [pytest.param(30.0, marks=pytest.mark.slow), 200.0])
def test_a_short_failure_leaves_nobody_out(slow_s: float) -> None:
    scenario, plan = one_behind(4, [(40.0, 1.0), (slow_s, 1 / 200), (1e5, 1.0)])
    assert devices(run(scenario, plan, 1500.0)) == [4]


@pytest.mark.slow
def test_a_worker_is_taken_back_and_stays_if_its_links_have_recovered() -> None:
    scenario, plan = one_behind(4, [(40.0, 1.0), (2500.0, 1 / 200), (1e5, 1.0)])
    record = run(scenario, plan, 8000.0)
    assert devices(record) == [4, 3, 4]


def test_without_a_law_of_the_loss_all_workers_stay() -> None:
    scenario, plan = one_behind(4, [(40.0, 1.0), (1e5, 1 / 200)])
    scenario = replace(scenario, training=replace(scenario.training, convergence=None))
    assert not run(scenario, plan, 3000.0).decisions


RATES = st.lists(st.tuples(st.floats(20, 1500), st.floats(1 / 200, 2)), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(2, 4), st.sampled_from([20, 100]), RATES)
def test_no_course_of_a_workers_links_costs_much(
    workers: int, most_interval: int, rates: list[tuple[float, float]]
) -> None:
    scenario, plan = one_behind(workers, rates, most_interval)
    kept, adapted = (progress_of(run(scenario, plan, 3000.0, adapts=adapts)) for adapts in (False, True))
    assert adapted >= 0.9 * kept


@pytest.mark.slow
def test_a_real_run_leaves_out_the_same_worker() -> None:
    scenario, plan = one_behind(3, [(0.8, 1.0), (1e5, 1 / 30)], most_interval=2, step_s=0.02)
    policies = (make_policy("auto", scenario) for _ in range(2))
    real = TorchBackend("paced", emulator="shaper").run(scenario, plan, next(policies), 120)
    simulated = Simulator().run(scenario, plan, next(policies), 120)
    for record in (real, simulated):
        assert devices(record) == [3, 2]
        left = next(each.plan.devices for each in record.decisions if len(each.plan.devices) == 2)
        assert left == plan.devices[:2]
