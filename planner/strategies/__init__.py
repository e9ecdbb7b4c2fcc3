"""What makes plans, by name: one file each, behind one small interface."""

from collections.abc import Callable, Mapping

from planner.check import check_plan
from planner.plan import Plan
from planner.scenario import Scenario
from planner.strategies.adaptdl import adaptdl
from planner.strategies.asteroid import asteroid, asteroid_duplex
from planner.strategies.auto import auto
from planner.strategies.cannikin import cannikin
from planner.strategies.cloudless import cloudless
from planner.strategies.dapple import dapple
from planner.strategies.ddp import ddp
from planner.strategies.deepcee import deepcee
from planner.strategies.gpipe import gpipe
from planner.strategies.greedy import greedy
from planner.strategies.hetpipe import hetpipe
from planner.strategies.lb_bsp import lb_bsp
from planner.strategies.megatron import megatron
from planner.strategies.pipedream import pipedream
from planner.strategies.zb_equal import zb_equal
from traces.naming import find_by_name

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

    Raises:
        InputError: No strategy has this name, or its plan does not fit the scenario.
    """
    plan = find_by_name(strategy, STRATEGIES, "strategy")(scenario)
    check_plan(plan, scenario)
    return plan
