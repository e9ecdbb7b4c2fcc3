"""Each mechanism is weakened in the system itself: its row of the ablations must move to that of no gain.

A row that stays would measure something else than the mechanism that it names.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from statistics import mean
from typing import Any

import pytest

from experiments.benches.result import Row
from experiments.reproductions.asteroid import recovery
from experiments.reproductions.asteroid import reproduction as asteroid
from experiments.reproductions.cannikin import reproduction as cannikin
from experiments.reproductions.cannikin.training import Setting, base_scenario
from experiments.reproductions.cloudless import measurements
from experiments.reproductions.cloudless import reproduction as cloudless
from experiments.reproductions.comparisons.ablation import MOVES
from experiments.reproductions.comparisons.best_plan import best_entry
from experiments.reproductions.deepcee import reproduction as deepcee
from experiments.reproductions.deepcee.adapter import adapter_row, changing_links
from planner.cost.in_flight import latency_aware_depths, plain_depths
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.policy import replay, where_they_were
from planner.systems.asteroid.stage_costs import StageCosts
from planner.systems.asteroid.strategy import HybridRules, plain_depth
from planner.systems.cannikin.goodput import choose_batch
from planner.systems.cannikin.opt_perf import real_division
from planner.systems.cannikin.speed_learning import SumLearner
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed
from planner.systems.cloudless.elastic_scheduling import elastic_schedule, greedy_schedule
from planner.systems.cloudless.strategy import with_exchanges
from planner.systems.deepcee import strategy as deepcee_strategy
from planner.systems.deepcee.device_groups import Group
from planner.systems.deepcee.pipeline_search import Candidate
from planner.systems.deepcee.policy import DeepceePolicy
from planner.systems.deepcee.strategy import Mechanisms

Gains = Mapping[str, float]


def gains(rows: Sequence[Row]) -> Gains:
    """Return the mean gain of each mechanism."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(str(row["mechanism"]), []).append(float(row["gain"]))
    return {mechanism: mean(values) for mechanism, values in found.items()}


def asteroid_gains() -> Gains:
    setting = asteroid.Setting("fp32", "MobileNetV2", "4 boards", 256)
    return gains(asteroid.measured_case(setting, lambda _: None).ablations)


def deepcee_gains() -> Gains:
    setting = deepcee.settings()[1]
    scenario = setting.scenario
    plan = best_entry("deepcee", scenario).plan
    assert plan is not None
    step_s = plan.global_batch / best_entry("deepcee", scenario).samples_per_s
    trace = changing_links(setting.bandwidth_bps, step_s)["drop to 30%"]
    ends = deepcee._first_wan_ends(plan, scenario)
    assert ends is not None
    adapted = {"mechanism": "adapter, drop: none", **adapter_row(scenario, plan, ends, trace)}
    return gains([*deepcee._ablations(setting, scenario), adapted])


def cannikin_gains() -> Gains:
    setting = Setting(base_scenario("A", "resnet18", 10e9), "middle", 6)
    return gains(cannikin._ablations(cannikin._train("A", 10e9, setting)))


def cloudless_gains() -> Gains:
    rental = measurements.rental_rows(True, lambda _: None)
    exchange = measurements.exchange_rows(True, lambda _: None)
    return {name: mean(values) for name, values in cloudless._gains(rental, exchange).items()}


SYSTEMS: Mapping[str, Callable[[], Gains]] = {
    "asteroid": asteroid_gains,
    "cannikin": cannikin_gains,
    "cloudless": cloudless_gains,
    "deepcee": deepcee_gains,
}


@cache
def whole_gains(system: str) -> Gains:
    """Return the gains of the whole system."""
    return SYSTEMS[system]()


def where_they_had_been(plan: Plan, scenario: Scenario, gone: Collection[str], *_: object) -> Plan:
    return replay(plan, scenario, gone, (where_they_were,))


def undivided(batch: float, speeds: Sequence[NodeSpeed], *_: object) -> tuple[tuple[float, ...], float]:
    return (batch / len(speeds),) * len(speeds), 0.0


def every_step(plan: Plan, method: str, _: int) -> Plan:
    return with_exchanges(plan, method, 1)


def as_listed(scenario: Scenario) -> Iterator[tuple[Group, ...]]:
    yield deepcee_strategy._as_named(scenario)


def one_f_one_b_plan(
    candidate: Candidate, _: Mechanisms, scenario: Scenario, plan: Any = deepcee_strategy._plan
) -> Plan:
    found: Plan = plan(candidate, Mechanisms(zero_bubble=False), scenario)
    return found


def plain(compute_s: Sequence[float], *_: object) -> tuple[int, ...]:
    return plain_depths(len(compute_s))


# System, mechanism as its row names it, what has the mechanism, and what has it no more.
WEAKENED: Sequence[tuple[str, str, Any, Any]] = [
    ("asteroid", "allocation by speed: equal", StageCosts._range_times_s, lambda self, *_: range(self._samples + 1)),
    ("asteroid", "depths 2(P - p) - 1: P - p", HybridRules, partial(HybridRules, depth=plain_depth)),
    ("asteroid", "groups of boards: single boards", HybridRules, partial(HybridRules, widest=1)),
    ("asteroid", "replay: heavy rescheduling", recovery._replayed, recovery._rescheduled),
    ("asteroid", "replay, boundary shift: lost layers only", replay, where_they_had_been),
    ("asteroid", "replay, ours, choice of shift: in proportion", replay, where_they_had_been),
    ("cannikin", "batch by goodput: the first batch", choose_batch, lambda current, *_: current),
    ("cannikin", "shares by OptPerf: equal shares", real_division, undivided),
    ("cannikin", "overlap of sums with backward, known: not known", SumLearner.sums, lambda _: NO_SUMS),
    ("cloudless", "elastic scheduling: every GPU", elastic_schedule, greedy_schedule),
    ("cloudless", "accumulation over f steps: 1", with_exchanges, every_step),
    ("deepcee", "groups, order and choice of regions: all devices as listed", deepcee_strategy._chains, as_listed),
    ("deepcee", "zero bubble: 1F1B", deepcee_strategy._plan, one_f_one_b_plan),
    ("deepcee", "depths that hide latency: those of 1F1B", latency_aware_depths, plain),
    ("deepcee", "adapter, drop: none", DeepceePolicy.decide, lambda *_: None),
]


def weaken(patch: pytest.MonkeyPatch, whole: Any, weak: Any) -> None:
    """Replace a function, method or class wherever the modules of this project have it."""
    modules = [each for name, each in sys.modules.items() if name.partition(".")[0] in ("planner", "experiments")]
    classes = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    for owner in dict.fromkeys((*modules, *classes)):
        for name in [name for name, value in vars(owner).items() if value is whole]:
            patch.setattr(owner, name, weak)


@pytest.fixture(autouse=True)
def fresh_entries() -> Iterator[None]:
    """Keep plans of a weakened system from other tests, and those of the whole one from this."""
    best_entry.cache_clear()
    yield
    best_entry.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(("system", "mechanism", "whole", "weak"), WEAKENED, ids=[each[1] for each in WEAKENED])
def test_a_weakened_mechanism_gains_nothing(
    system: str, mechanism: str, whole: Any, weak: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = whole_gains(system)[mechanism]
    assert abs(before - 1) > MOVES
    best_entry.cache_clear()
    weaken(monkeypatch, whole, weak)
    after = SYSTEMS[system]()[mechanism]
    assert abs(after - 1) < abs(before - 1) / 2
