"""What of each published system is run for real: settings of its reproduction that two cores can carry.

The first contender is the system, or what it does; the others are what it is held against.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.reproductions.asteroid.settings import CLUSTERS, edge_scenario
from experiments.reproductions.cannikin.clusters import base_scenario
from experiments.reproductions.cloudless.settings import (
    PASCAL,
    RESNET_18,
    SMALL_CNN,
    VOLTA,
    rental_scenario,
    server_scenario,
)
from experiments.reproductions.deepcee.scenarios import deepcee_scenario
from experiments.reproductions.executed.execution import Contender, Contest
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cloudless.strategy import with_exchanges
from planner.systems.registry import make_plan
from traces.trace import LinkTrace

STEPS = 4
ADAPTED_STEPS = 12
EXCHANGE_STEPS = 48

# Of a step of hundreds of messages between eight devices, and of one of few.
LONG_S, SHORT_S = 2.0, 0.5

# Where one contender takes tens of times as long as the other.
FEW_STEPS = 3

# The first setting of DeepCEE's reproduction, and a drop of its links that stays.
_CLUSTER, _MODEL, _WAN_BPS, _WAN_S = "data centres", "gpt-2.7b", 1e9, 0.01
_DROP_AT_S, _DROP_TO = 40.0, 0.3

# The network of Cannikin's ablations.
_NETWORK_BPS = 10e9


def deepcee_contests() -> list[Contest]:
    """Pipelines across three data centres, devices region by region and in turn; and the adapter when a link drops."""
    contests = []
    for mixed in (False, True):
        scenario = deepcee_scenario(_CLUSTER, _MODEL, _WAN_BPS, _WAN_S, mixed=mixed)
        order = "devices in turn" if mixed else "region by region"
        rivals = ("deepcee", "megatron", "asteroid")
        contests.append(Contest(f"{_CLUSTER}, {_MODEL}, {order}", scenario, _planned(scenario, rivals), STEPS, LONG_S))
    drop = LinkTrace(np.array([0.0, _DROP_AT_S]), np.array([_WAN_BPS, _DROP_TO * _WAN_BPS]), 1e6)
    scenario = deepcee_scenario(_CLUSTER, _MODEL, _WAN_BPS, _WAN_S, trace=drop)
    plan = make_plan("deepcee", scenario)
    contests.append(
        Contest(
            f"{_CLUSTER}, {_MODEL}, a link drops to {_DROP_TO:.0%}",
            scenario,
            _with_policies(plan, "deepcee", "none"),
            ADAPTED_STEPS,
            LONG_S,
        )
    )
    return contests


def asteroid_contests() -> list[Contest]:
    """Jetson boards on their LAN; how they recover is measured by ``ropebridge bench recovery``."""
    mobile, efficient = (edge_scenario(model, CLUSTERS["4 boards"], 32) for model in ("MobileNetV2", "EfficientNet-B1"))
    pipelines = _planned(mobile, ("asteroid", "gpipe", "pipedream", "dapple"))
    parallel = _planned(efficient, ("asteroid", "ddp"))
    return [
        Contest("MobileNetV2, 4 boards, batch 32", mobile, pipelines, STEPS, LONG_S),
        Contest("EfficientNet-B1, 4 boards, batch 32", efficient, parallel, FEW_STEPS, SHORT_S),
    ]


def cannikin_contests() -> list[Contest]:
    """Three unlike GPUs: shares by OptPerf from the start, and learned by the policy from even ones."""
    scenario = base_scenario("A", "resnet50", _NETWORK_BPS)
    where = "resnet50, cluster A, 10 Gbit/s"
    planned = _planned(scenario, ("cannikin", "ddp", "lb-bsp"))
    learned = _with_policies(make_plan("ddp", scenario), "cannikin", "none")
    return [
        Contest(where, scenario, planned, STEPS, SHORT_S),
        Contest(f"{where}, shares learned", scenario, learned, ADAPTED_STEPS, SHORT_S),
    ]


def cloudless_contests() -> list[Contest]:
    """Two regions that exchange updates rarely, or in every step; and GPUs that are given back."""
    small = server_scenario(SMALL_CNN, "cpu-core", 32)
    large = server_scenario(RESNET_18, "cpu-server", 128)
    contests = [
        Contest(f"{name} samples a region", scenario, _exchanges(make_plan("greedy", scenario)), EXCHANGE_STEPS, step_s)
        for name, scenario, step_s in (("small-cnn, 32", small, None), ("resnet-18, 128", large, SHORT_S))
    ]
    rental = rental_scenario((PASCAL, VOLTA), 4, (2, 1))
    planned = _planned(rental, ("cloudless", "greedy"))
    contests.append(
        Contest("4 P100 and 4 V100, data 2:1, samples per dollar", rental, planned, STEPS, LONG_S, per_dollar=True)
    )
    return contests


CONTESTS: Mapping[str, Callable[[], Sequence[Contest]]] = {
    "asteroid": asteroid_contests,
    "cannikin": cannikin_contests,
    "cloudless": cloudless_contests,
    "deepcee": deepcee_contests,
}


def _planned(scenario: Scenario, strategies: Sequence[str]) -> dict[str, Contender]:
    return {name: (make_plan(name, scenario), "none") for name in strategies}


def _with_policies(plan: Plan, *policies: str) -> dict[str, Contender]:
    return {f"policy {name}": (plan, name) for name in policies}


def _exchanges(plan: Plan) -> dict[str, Contender]:
    ways = {"asgd-ga, every 8": ("asgd-ga", 8), "ma, every 8": ("ma", 8), "asgd": ("asgd", 1)}
    return {name: (with_exchanges(plan, *way), "none") for name, way in ways.items()}
