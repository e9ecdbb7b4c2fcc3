"""What elastic scheduling saves: the simulated cost of `cloudless` against that of `greedy`, setting by setting."""

from collections.abc import Callable
from itertools import product

from experiments.benches.result import Row
from experiments.reproductions.cloudless.settings import GENERATIONS, rental_scenario
from planner.plan.plan import Plan
from planner.runs.metrics import Metrics, measure
from planner.scenario.scenario import Scenario
from planner.systems.cloudless.elastic_scheduling import elastic_schedule, greedy_schedule
from planner.systems.cloudless.strategy import region_offers
from planner.systems.registry import make_plan
from sim.simulator import Simulator

# Data of the older generation's region and of the newer one's.
RATIOS = ((1, 1), (2, 1), (1, 2))
# For rent in each region.
UNITS = (4, 8)

STEPS = 64
QUICK_STEPS = 16


def rental_rows(quick: bool, tell: Callable[[str], None]) -> list[Row]:
    """Return what each setting saves, by the formula and as simulated; quickly, only those of four older GPUs."""
    rows: list[Row] = []
    for generations, units, data in product(GENERATIONS[:1] if quick else GENERATIONS, UNITS, RATIOS):
        older, newer = (each.kind for each in generations)
        tell(f"cost of {units} {older} and {units} {newer}, data {data[0]}:{data[1]}")
        scenario = rental_scenario(generations, units, data)
        greedy, elastic = (make_plan(name, scenario) for name in ("greedy", "cloudless"))
        before, after = (run_for(scenario, plan, QUICK_STEPS if quick else STEPS) for plan in (greedy, elastic))
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
    """Return what a simulated run of so many steps amounts to."""
    return measure(Simulator().run(scenario, plan, None, steps))
