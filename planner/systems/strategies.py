"""What makes plans, by name: one file each, behind one small interface."""

from collections.abc import Callable, Mapping
from pathlib import Path

from planner.check.check import check_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.strategy import asteroid, asteroid_duplex
from planner.systems.auto.strategy import auto
from planner.systems.baselines.dapple import dapple
from planner.systems.baselines.ddp import ddp
from planner.systems.baselines.hetpipe import hetpipe
from planner.systems.baselines.pipedream import pipedream
from planner.systems.baselines.uniform import gpipe, megatron, zb_equal
from planner.systems.cannikin.strategy import adaptdl, cannikin, lb_bsp
from planner.systems.cloudless.strategy import cloudless, greedy
from planner.systems.deepcee.strategy import deepcee
from planner.systems.user_code import load_function, user_code
from traces.common.errors import InputError
from traces.common.names import find_by_name

Strategy = Callable[[Scenario], Plan]

STRATEGIES: Mapping[str, Strategy] = {
    "adaptdl": adaptdl,
    "asteroid": asteroid,
    "asteroid-duplex": asteroid_duplex,
    "auto": auto,
    "cannikin": cannikin,
    "cloudless": cloudless,
    "dapple": dapple,
    "ddp": ddp,
    "deepcee": deepcee,
    "gpipe": gpipe,
    "greedy": greedy,
    "hetpipe": hetpipe,
    "lb-bsp": lb_bsp,
    "megatron": megatron,
    "pipedream": pipedream,
    "zb-h1-equal": zb_equal,
}


def make_plan(strategy: str, scenario: Scenario) -> Plan:
    """Return the checked plan that a strategy makes for a scenario.

    Args:
        strategy: Its name, or a Python file with a function ``plan`` of a scenario.
        scenario: What is trained, and where.

    Raises:
        InputError: There is no such strategy, or its plan does not fit the scenario.
    """
    plan = _from_file(Path(strategy), scenario) if strategy.endswith(".py") else None
    if plan is None:
        plan = find_by_name(strategy, STRATEGIES, "strategy")(scenario)
    check_plan(plan, scenario)
    return plan


def _from_file(path: Path, scenario: Scenario) -> Plan:
    make = load_function(path, "plan", "strategy", "plan(scenario) that returns a planner.plan.plan.Plan")
    with user_code(path, "'plan' fails", "correct the strategy"):
        made = make(scenario)
    if not isinstance(made, Plan):
        raise InputError(
            f"'plan' returns a {type(made).__name__}", where=str(path), valid="return a planner.plan.plan.Plan"
        )
    return made
