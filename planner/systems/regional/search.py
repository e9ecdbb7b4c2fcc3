"""The search for the plan that reaches a loss in the least time, or at the least cost.

The time to a loss is the number of steps, by a law of the task's loss (`planner.scenario.convergence`), times the time
of a step with its exchanges. Candidates are the best plans that sum gradients in every step, and workers side by side,
each the best pipeline of a region or of two, with every method, interval, number of fragments, compression and outer
momentum that the law covers.

Among up to `MOST_REGIONS` regions, all sets of them are tried, and for sums of gradients too if they are at most
`MOST_SUMMED`: there, another region never lengthens the time to the loss, because the candidates without it remain. In
more regions, workers are the quickest regions in their order, for each number of them, and all regions but one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import ceil

from planner.check import is_possible
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.convergence import ALLREDUCE, Steps, TrainingMode
from planner.scenario.scenario import Scenario, within_regions
from planner.systems.auto.objective import Objective, contended_step_time_s, traffic_price
from planner.systems.auto.strategy import plan_for
from planner.systems.regional.loss_plan import (
    DILOCO,
    STREAMING,
    TIME,
    FoundPlan,
    LossGoal,
    LossPlan,
    outer_settings,
)
from planner.systems.regional.outer_time import ExchangePaths, ExchangeTimes
from planner.systems.regional.workers import SCHEDULES, TimedPipeline, Worker, WorkerSearch, side_by_side
from traces.common.errors import InputError

MOST_REGIONS, MOST_SUMMED = 4, 3
_MOST_JOINED = 2

# Intervals and fragments that are tried.
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_FRAGMENTS = (1, 2, 4, 8)

_NAME = "auto"


def plan_to_loss(scenario: Scenario, goal: LossGoal) -> FoundPlan:
    """Return the plan that reaches the loss in the least time or at the least cost; it compresses no activations.

    Raises:
        InputError: No plan fits into memory or keeps the limits, or by the law none reaches the loss.
    """
    # Laws do not know what rounding the messages between stages costs.
    scenario = replace(scenario, training=replace(scenario.training, compressions=("none",)))
    search = _Search(scenario, goal)
    summed_plans, failure = _summed(scenario)
    summed = [each for plan in summed_plans for each in search.synchronous(plan)]
    found = [*summed, *(each for base in search.bases(summed_plans) for each in search.outer(*base))]
    if not found:
        if failure is not None and not search.judged:
            raise failure
        raise InputError(
            f"by {goal.law.source}, no method reaches a loss of {goal.loss:g} within the limits",
            where="--loss",
            valid="give a higher loss or wider limits, or measure other methods with 'ropebridge profile convergence'",
        )
    return FoundPlan(min(found, key=search.score), min(summed, key=search.score, default=None))


class _Search:
    def __init__(self, scenario: Scenario, goal: LossGoal) -> None:
        self._scenario, self._goal = scenario, goal
        self._workers = WorkerSearch(scenario)
        self._steps: dict[TrainingMode, Steps] = {}
        # Number of plans whose steps to the loss were asked for.
        self.judged = 0

    def score(self, each: LossPlan) -> float:
        return each.time_s if self._goal.name == TIME else each.cost

    def synchronous(self, plan: Plan) -> Iterator[LossPlan]:
        """Yield a plan that sums gradients in every step, if it reaches the loss within the limits."""
        step_s = contended_step_time_s(plan, self._scenario)
        yield from self._able(plan, TrainingMode(ALLREDUCE, plan.global_batch), step_s, step_s, 0.0)

    def bases(self, summed_plans: Sequence[Plan]) -> Iterator[tuple[Plan, list[float]]]:
        """Yield plans of separate pipelines, with the time of each one's step without exchanges, seconds."""
        if self._scenario.model.tied_layers:
            # Only sums of gradients keep the copies of tied layers equal.
            return
        for workers in self._worker_sets():
            for schedule in SCHEDULES:
                made = side_by_side(workers, self._scenario.training.global_batch, schedule)
                if made is not None:
                    yield self._plan(made, schedule), [each.step_s for each in made]
        for plan in summed_plans:
            if len(plan.pipelines) > 1 and all(replica.tensor_parallel == 1 for replica in plan.replicas):
                apart = replace(plan, synchronisation=Synchronisation(DILOCO))
                yield apart, [contended_step_time_s(apart, self._scenario)] * len(apart.pipelines)

    def outer(self, base: Plan, inner_s: Sequence[float]) -> Iterator[LossPlan]:
        """Yield the plan with all settings of outer steps with which it reaches the loss within the limits."""
        if not is_possible(base, self._scenario):
            return
        layers, paths, law = len(self._scenario.model.layers), ExchangePaths(base, self._scenario), self._goal.law
        for compression, method in product(law.compressions, (DILOCO, STREAMING)):
            for fragments in (1,) if method == DILOCO else tuple(n for n in _FRAGMENTS if n <= layers):
                mode = TrainingMode(method, base.global_batch, len(base.pipelines), fragments, fragments, compression)
                times = paths.times(outer_settings(mode, 0))
                for interval, momentum in product(INTERVALS, law.momenta):
                    if fragments <= interval:
                        asked = replace(mode, interval_steps=interval, momentum=momentum)
                        yield from self._with(base, inner_s, times, asked)

    def _with(
        self,
        base: Plan,
        inner_s: Sequence[float],
        times: ExchangeTimes,
        mode: TrainingMode,
    ) -> Iterator[LossPlan]:
        if not self._goal.law.covers(mode):
            return
        interval, overlap = mode.interval_steps, 0
        if mode.method == STREAMING:
            # As much as hides a fragment, but no more than the steps until the next one leaves.
            slowest_s = max(inner_s)
            needed = ceil(times.longest_s / slowest_s) if slowest_s else 0
            overlap = min(needed, interval // mode.fragments, interval - 1)
        outer = outer_settings(mode, overlap)
        plan = replace(base, synchronisation=Synchronisation(mode.method, interval_steps=interval, outer=outer))
        step_s = times.step_s(inner_s, interval, outer)
        yield from self._able(plan, mode, max(inner_s), step_s, times.traffic_price / interval)

    def _able(
        self, plan: Plan, mode: TrainingMode, inner_s: float, step_s: float, exchange_price: float
    ) -> Iterator[LossPlan]:
        self.judged += 1
        if mode not in self._steps:
            self._steps[mode] = self._goal.law.steps_to(self._goal.loss, mode)
        per_hour = sum(self._scenario.cluster.by_name[device].price_per_hour for device in plan.devices)
        price = per_hour * step_s / 3600 + traffic_price(plan, self._scenario) + exchange_price
        budget, rate = self._goal.budget_per_hour, self._goal.samples_per_s
        dear = budget is not None and 3600 * price > budget * step_s
        slow = rate is not None and plan.global_batch < rate * step_s
        if self._steps[mode].converges and not dear and not slow:
            yield LossPlan(plan, mode, self._steps[mode], inner_s, step_s, price)

    def _plan(self, made: Sequence[TimedPipeline], schedule: str) -> Plan:
        pipelines = tuple(each.pipeline for each in made)
        name = self._scenario.name, self._scenario.model.name
        return Plan(*name, _NAME, schedule, pipelines, synchronisation=Synchronisation(DILOCO))

    def _worker_sets(self) -> Iterator[list[Worker]]:
        """Yield sets of two workers or more, on different regions."""
        regions = sorted(self._scenario.cluster.regions)
        if len(regions) <= MOST_REGIONS:
            for blocks in _partial_partitions(regions):
                workers = [self._workers.worker(block) for block in blocks]
                if len(blocks) > 1 and None not in workers:
                    yield [worker for worker in workers if worker is not None]
            return
        able = [worker for region in regions if (worker := self._workers.worker((region,))) is not None]
        able.sort(key=lambda worker: -worker.samples_per_s)
        yield from (able[:count] for count in range(2, len(able) + 1))
        if len(able) > 2:
            yield from (able[:index] + able[index + 1 :] for index in range(len(able) - 1))


def _partial_partitions(regions: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield every way to put some of the regions into disjoint blocks of up to `_MOST_JOINED`."""
    if not regions:
        yield ()
        return
    first, rest = regions[0], regions[1:]
    yield from _partial_partitions(rest)
    for count in range(_MOST_JOINED):
        for others in combinations(rest, count):
            left = [region for region in rest if region not in others]
            for blocks in _partial_partitions(left):
                yield ((first, *others), *blocks)


def _summed(scenario: Scenario) -> tuple[list[Plan], InputError | None]:
    """Return plans that sum gradients in every step, and why there is none for all regions, if so."""
    regions = scenario.cluster.regions
    if len(regions) <= MOST_SUMMED:
        sets = [each for count in range(1, len(regions) + 1) for each in combinations(regions, count)]
    else:
        sets = [tuple(regions)]
    plans, failure = [], None
    for each in sets:
        try:
            plans.append(plan_for(within_regions(scenario, each), Objective()))
        except InputError as error:
            failure = error
    return plans, failure
