"""The policy ``streaming`` on a link that becomes slow and recovers: exchanges stay hidden, by both backends."""

from dataclasses import replace

import pytest

from executor.backend import TorchBackend
from planner.check import check_plan
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster
from planner.scenario.convergence import LossLaw
from planner.scenario.scenario import Scenario
from planner.systems.regional.loss_plan import STREAMING
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from tests.sim.test_outer_steps import BYTES_PER_S, regions
from traces.trace import LinkTrace

STREAMS = OuterStep(fragments=2, pattern="strided", overlap_steps=1, mixing=0.5)


def slowed(step_s: float, slow_s: tuple[float, float], share: float) -> tuple[Scenario, Plan]:
    """Two workers; a fragment takes half a step at the full rate, of which ``share`` is left in between."""
    scenario, plan = regions([step_s, step_s], [step_s / 2, step_s / 2], 5, STREAMS)
    full_bps = 8.0 * BYTES_PER_S
    trace = LinkTrace([0.0, *slow_s], [full_bps, share * full_bps, full_bps], 1e6)
    links = tuple(replace(link, trace=trace) for link in scenario.cluster.links)
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links)), plan


def settings(record: RunRecord) -> list[tuple[int, int]]:
    hows = [decision.plan.synchronisation for decision in record.decisions]
    return [(how.interval_steps, how.outer.overlap_steps) for how in hows]


def test_exchanges_are_hidden_while_a_link_is_slow_and_become_frequent_again() -> None:
    """A fragment takes 4 steps on the slow link, less than a quarter of 20; shorter intervals are tried later."""
    scenario, plan = slowed(1.0, (40.0, 200.0), 0.125)
    kept = Simulator().run(scenario, plan, None, 200)
    adapted = Simulator().run(scenario, plan, make_policy("streaming", scenario), 800)
    for decision in adapted.decisions:
        check_plan(decision.plan, scenario)
    assert settings(adapted)[0] == (20, 5)
    assert settings(adapted)[1:] == [(10, 2), (5, 1), (2, 1)]
    # Steps take 1 s; the slow link takes 8 s for the fragments of every 5 of them, for which kept settings wait.
    assert ended_s(kept) > 250
    assert ended_s(adapted) < 850


def ended_s(record: RunRecord) -> float:
    return max(event.end_s for event in record.events)


@pytest.mark.parametrize(("most", "expected"), [(10, [(10, 2)]), (500, [(20, 5)])])
def test_intervals_beyond_the_law_of_the_loss_are_left_alone(most: int, expected: list[tuple[int, int]]) -> None:
    scenario, plan = slowed(1.0, (20.0, 1000.0), 0.125)
    mean = (0.0,) * 13
    law = LossLaw("made up", 1.0, mean, (mean,), (STREAMING,), ("none",), most, 2)
    scenario = replace(scenario, training=replace(scenario.training, convergence=law))
    assert settings(Simulator().run(scenario, plan, make_policy("streaming", scenario), 100)) == expected


def test_other_methods_are_left_alone() -> None:
    scenario, plan = slowed(1.0, (20.0, 1000.0), 0.125)
    plan = replace(plan, synchronisation=replace(plan.synchronisation, method="diloco", outer=OuterStep()))
    assert not Simulator().run(scenario, plan, make_policy("streaming", scenario), 60).decisions


@pytest.mark.slow
def test_a_real_run_takes_the_same_decision() -> None:
    scenario, plan = slowed(0.1, (1.0, 1000.0), 0.125)
    real = TorchBackend("paced", emulator="shaper").run(scenario, plan, make_policy("streaming", scenario), 60)
    simulated = Simulator().run(scenario, plan, make_policy("streaming", scenario), 60)
    assert settings(simulated)[0] == settings(real)[0] == (20, 5)
