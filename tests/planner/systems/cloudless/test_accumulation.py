"""The policy finds the number of steps between exchanges with which no region waits, whatever the links declare."""

from dataclasses import replace

import pytest

from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario
from planner.systems.cloudless.policy import CloudlessPolicy
from planner.systems.cloudless.strategy import with_exchanges
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import mesh_scenario

STEP_S = 0.3
SIZE_BYTES = 100_000


def two_regions(exchange_s: float) -> tuple[Scenario, Plan]:
    """A step takes 0.3 s, an exchange ``exchange_s``."""
    scenario = mesh_scenario(
        2,
        [STEP_S / 3 / 4],
        [2 * STEP_S / 3 / 4],
        parameter_bytes=[SIZE_BYTES],
        link=lambda a, b: (8 * SIZE_BYTES / exchange_s, 0.0),
        global_batch=8,
        regions=["north", "south"],
    )
    return scenario, make_plan("cloudless", scenario)


@pytest.mark.parametrize(("exchange_s", "start", "found"), [(0.9, 1, 4), (2.0, 2, 8), (30.0, 1, 16)])
def test_intervals_grow_until_exchanges_are_hidden(exchange_s: float, start: int, found: int) -> None:
    scenario, plan = two_regions(exchange_s)
    plan = with_exchanges(plan, "asgd-ga", start)
    adapted = Simulator().run(scenario, plan, CloudlessPolicy(scenario), 100)
    intervals = [decision.plan.synchronisation.interval_steps for decision in adapted.decisions]
    assert intervals[0] == found
    # A smaller number is tried now and then, and given up.
    assert set(intervals) <= {found, found // 2}
    fixed = Simulator().run(scenario, plan, None, 100)
    assert measure(adapted).samples_per_s > 1.5 * measure(fixed).samples_per_s
    assert measure(adapted).wan_bytes < measure(fixed).wan_bytes


def test_intervals_fall_where_exchanges_become_short() -> None:
    scenario, plan = two_regions(0.05)
    plan = with_exchanges(plan, "ma", 4)
    adapted = Simulator().run(scenario, plan, CloudlessPolicy(scenario), 120)
    intervals = [decision.plan.synchronisation.interval_steps for decision in adapted.decisions]
    assert intervals == [2, 1]
    assert all(decision.plan.pipelines == plan.pipelines for decision in adapted.decisions)


def test_a_bound_of_the_users_own_is_kept() -> None:
    scenario, plan = two_regions(2.0)
    plan = replace(plan, synchronisation=replace(plan.synchronisation, interval_steps=2, staleness_bound=5))
    assert not Simulator().run(scenario, plan, CloudlessPolicy(scenario), 60).decisions
