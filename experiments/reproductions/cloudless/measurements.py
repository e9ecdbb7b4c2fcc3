"""Measures Cloudless-Training's claims in the simulator: the cost of rented GPUs, and the speed-up by rarer exchanges.

Asynchronous pipelines wait for the WAN only when they reach the bound on their staleness. Two bounds are measured: one
exchange in flight during the next steps, as in `planner.systems.cloudless.strategy`; and none, where every step waits
for the last exchange. With T_c the compute time of a step, tau the time of an exchange, and f steps between exchanges,
the second bound gives::

    speed-up over an exchange in every step = (T_c + tau) / (T_c + tau / f)
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from experiments.benches.result import Row
from experiments.reproductions.cloudless.settings import (
    GENERATIONS,
    RESNET_18,
    SMALL_CNN,
    rental_scenario,
    server_scenario,
)
from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Plan, Synchronisation
from planner.runs.metrics import Metrics, measure
from planner.scenario.effects import Effects
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.cloudless.elastic_scheduling import elastic_schedule, greedy_schedule
from planner.systems.cloudless.strategy import EXCHANGE_STEPS, longest_exchange_s, region_offers, with_exchanges
from planner.systems.registry import make_plan
from sim.simulator import Simulator

# Ratio of the samples in the region of the older generation to those in the region of the newer one.
RATIOS = ((1, 1), (2, 1), (1, 2))
# Number of GPUs for rent in each region.
UNITS = (4, 8)

RENTAL_STEPS = 64
QUICK_RENTAL_STEPS = 16


def rental_rows(quick: bool, tell: Callable[[str], None]) -> list[Row]:
    """Return the savings of each setting, by the formula and simulated; ``quick`` takes the older GPUs only."""
    rows: list[Row] = []
    for generations, units, data in product(GENERATIONS[:1] if quick else GENERATIONS, UNITS, RATIOS):
        older, newer = (each.kind for each in generations)
        tell(f"cost of {units} {older} and {units} {newer}, data {data[0]}:{data[1]}")
        scenario = rental_scenario(generations, units, data)
        greedy, elastic = (make_plan(name, scenario) for name in ("greedy", "cloudless"))
        before, after = (
            run_for(scenario, plan, QUICK_RENTAL_STEPS if quick else RENTAL_STEPS) for plan in (greedy, elastic)
        )
        offers = region_offers(scenario, "cloudless")
        formula = 1 - elastic_schedule(offers).price_per_hour / greedy_schedule(offers).price_per_hour
        rented = [len(pipeline.stages[0].replicas) for pipeline in elastic.pipelines]
        rows.append(
            {
                "generations": f"{older}, {newer}",
                "units": units,
                "data": f"{data[0]}:{data[1]}",
                "rented": f"{rented[0]}, {rented[1]}",
                "saving_by_formula": formula,
                "saving": 1 - after.cost_usd / before.cost_usd,
                "run_time_change": before.samples_per_s / after.samples_per_s - 1,
            }
        )
    return rows


def run_for(scenario: Scenario, plan: Plan, steps: int) -> Metrics:
    """Return the metrics of a simulated run."""
    return measure(Simulator().run(scenario, plan, None, steps))


# Number of steps of a run, a multiple of every number of steps between exchanges.
EXCHANGED_STEPS = 256
QUICK_EXCHANGED_STEPS = 128


def exchange_rows(quick: bool, tell: Callable[[str], None]) -> list[Row]:
    """Return each method's speed-up, bytes and staleness, for each number of steps between exchanges."""
    rows: list[Row] = []
    for name, scenario in _exchange_settings(quick).items():
        tell(f"exchanges of {name}")
        plan = make_plan("greedy", scenario)
        steps = QUICK_EXCHANGED_STEPS if quick else EXCHANGED_STEPS
        every_step = run_for(scenario, with_exchanges(plan, "asgd", 1), steps)
        waiting = run_for(scenario, _waiting(plan, 1), steps)
        compute_s = step_time_s(plan, scenario)
        exchange_s = longest_exchange_s(plan, scenario)
        for every in EXCHANGE_STEPS:
            sums, means = (
                run_for(scenario, with_exchanges(plan, method, every), steps) for method in ("asgd-ga", "ma")
            )
            rows.append(
                {
                    "model": name,
                    "compute_s": compute_s,
                    "exchange_s": exchange_s,
                    "every": every,
                    "asgd_ga": _speedup(sums, every_step),
                    "ma": _speedup(means, every_step),
                    "waiting": _speedup(run_for(scenario, _waiting(plan, every), steps), waiting),
                    "formula": (compute_s + exchange_s) / (compute_s + exchange_s / every),
                    "bytes_ratio": every_step.wan_bytes / sums.wan_bytes,
                    "staleness": sums.staleness,
                }
            )
    return rows


def _exchange_settings(quick: bool) -> dict[str, Scenario]:
    """Return scenarios with a server in each region, by the model's name and a region's samples per step."""
    settings = {} if quick else {"digits-mlp, 32": digits_scenario()}
    settings["small-cnn, 32"] = server_scenario(SMALL_CNN, "cpu-core", 32)
    for size in (128,) if quick else (128, 256, 512):
        settings[f"resnet-18, {size}"] = server_scenario(RESNET_18, "cpu-server", size)
    return settings


def digits_scenario() -> Scenario:
    """Return the ready scenario without TCP's effects, which neither the paper's model nor the shaper has."""
    return replace(choose_scenario("digits"), effects=Effects())


def _waiting(plan: Plan, every: int) -> Plan:
    return replace(plan, synchronisation=Synchronisation("asgd-ga", interval_steps=every, staleness_bound=0))


def _speedup(run: Metrics, before: Metrics) -> float:
    return run.samples_per_s / before.samples_per_s
