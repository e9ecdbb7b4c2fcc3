"""The search for the plan that reaches a loss in the least time, or at the least cost.

The time to a loss is the number of steps, by a law of the task's loss (`planner.scenario.convergence`), times the time
of a step with its exchanges. Candidates are the best plans that sum gradients in every step, and workers side by side,
each the best pipeline of a region or of two, with every method, interval, number of fragments, compression and outer
momentum that the law covers, and by allgather or reduce-scatter. These are taken to need as many steps: without
compression the results are equal, and with int4 the loss of four workers was 0.5 % lower with compressed means.

Among up to `MOST_REGIONS` regions, all sets of them are tried, and for sums of gradients too if they are at most
`MOST_SUMMED`: there, another region never lengthens the time to the loss, because the candidates without it remain. In
more regions, gradients are summed over all of them or, where prices count, over one. Workers are then all sets of up to
`_MOST_SUBSETS` regions. Of more they are the quickest regions in their order, for each number of them, all regions but
one, and those that are left if one after the other is taken away that has the slowest exchange. All have the schedule
that is the quickest in all regions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby
from math import ceil

from planner.check import is_possible
from planner.plan.outer_step import ALLGATHER, EXCHANGES, OuterStep
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.convergence import ALLREDUCE, Steps, TrainingMode
from planner.scenario.scenario import Scenario, allowing_compressions, within_regions
from planner.systems.auto.objective import Objective, contended_step_time_s, traffic_price
from planner.systems.auto.robust import mean_step_s
from planner.systems.auto.strategy import plan_for
from planner.systems.regional.loss_plan import (
    COST,
    DILOCO,
    STREAMING,
    TIME,
    FoundPlan,
    LossGoal,
    LossPlan,
    most_overlap,
    outer_modes,
    outer_settings,
)
from planner.systems.regional.outer_time import ExchangePaths, ExchangeTimes
from planner.systems.regional.worker_sets import partial_partitions, without_slowest_links
from planner.systems.regional.workers import SCHEDULES, TimedPipeline, Worker, WorkerSearch, side_by_side
from traces.common.errors import InputError

MOST_REGIONS, MOST_SUMMED = 4, 3
# In so many regions, and in clusters of up to `_MOST_TIMED` devices, all sets of regions become workers.
_MOST_SUBSETS = 8

# Length of the windows of traces over which steps are timed: about that of an exchange, which waits for the slowest of
# its links. In clusters of more devices, for which that takes minutes, links have their declared rates.
_WINDOW_S, _MOST_TIMED = 2.0, 64

_NAME = "auto"


def plan_to_loss(scenario: Scenario, goal: LossGoal) -> FoundPlan:
    """Return the plan that reaches the loss in the least time or at the least cost; it compresses no activations.

    Raises:
        InputError: No plan fits into memory or keeps the limits, or by the law none reaches the loss.
    """
    # Laws do not know what rounding the messages between stages costs.
    scenario = allowing_compressions(scenario, ("none",))
    search = _Search(scenario, goal)
    summed_plans, failure = _summed(scenario, goal)
    summed = [each for plan in summed_plans for each in search.synchronous(plan)]
    candidates = [*summed, *(each for base in search.bases(summed_plans) for each in search.outer(*base))]
    found = search.over_traces(candidates)
    if not found:
        if failure is not None and not search.judged:
            raise failure
        raise InputError(
            f"by {goal.law.source}, no method reaches a loss of {goal.loss:g} within the limits",
            where="--loss",
            valid="give a higher loss or wider limits, or measure other methods with 'ropebridge profile convergence'",
        )
    summed = [each for each in found if each.mode.method == ALLREDUCE]
    return FoundPlan(min(found, key=search.score), min(summed, key=search.score, default=None))


class _Search:
    def __init__(self, scenario: Scenario, goal: LossGoal) -> None:
        self._scenario, self._goal = scenario, goal
        self._workers = WorkerSearch(scenario)
        self._steps: dict[TrainingMode, Steps] = {}
        cluster = scenario.cluster
        self._varies = len(cluster.devices) <= _MOST_TIMED and any(link.trace is not None for link in cluster.links)
        # Number of plans whose steps to the loss were asked for.
        self.judged = 0

    def score(self, each: LossPlan) -> tuple[float, float]:
        """Return what the goal minimises, and what decides between equal ones."""
        return (each.time_s, each.cost) if self._goal.name == TIME else (each.cost, each.time_s)

    def synchronous(self, plan: Plan) -> Iterator[LossPlan]:
        """Yield a plan that sums gradients in every step, if it reaches the loss within the limits."""
        step_s = contended_step_time_s(plan, self._scenario)
        yield from self._able(plan, TrainingMode(ALLREDUCE, plan.global_batch), (step_s,), step_s, 0.0)

    def bases(self, summed_plans: Sequence[Plan]) -> Iterator[tuple[Plan, list[float]]]:
        """Yield plans of separate pipelines, with the time of each one's step without exchanges, seconds."""
        if self._scenario.model.tied_layers:
            # Only sums of gradients keep the copies of tied layers equal.
            return
        for workers, schedules in self._worker_sets():
            for schedule, made in self._timed(workers, schedules).items():
                yield self._plan(made, schedule), [each.step_s for each in made]
        for plan in summed_plans:
            if len(plan.pipelines) > 1 and all(replica.tensor_parallel == 1 for replica in plan.replicas):
                apart = replace(plan, synchronisation=Synchronisation(DILOCO))
                yield apart, [contended_step_time_s(apart, self._scenario)] * len(apart.pipelines)

    def outer(self, base: Plan, inner_s: Sequence[float]) -> Iterator[LossPlan]:
        """Yield the plan with all settings of outer steps with which it reaches the loss within the limits."""
        if not is_possible(base, self._scenario):
            return
        layers, paths = len(self._scenario.model.layers), ExchangePaths(base, self._scenario)
        mode = TrainingMode(DILOCO, base.global_batch, len(base.pipelines))
        modes = outer_modes(self._goal.law, mode, (DILOCO, STREAMING), layers)
        # Two workers send each other as many bytes either way, but by allgather at once.
        exchanges = EXCHANGES if len(base.pipelines) > 2 else (ALLGATHER,)
        for _, alike in groupby(modes, lambda each: (each.compression, each.method, each.fragments)):
            own = list(alike)
            for exchange in exchanges:
                times = paths.times(outer_settings(own[0], 0, exchange))
                for each in own:
                    yield from self._with(base, inner_s, times, each, exchange)

    def _with(
        self, base: Plan, inner_s: Sequence[float], times: ExchangeTimes, mode: TrainingMode, exchange: str
    ) -> Iterator[LossPlan]:
        """Yield the plan with the settings of ``mode``, and with every momentum that the law covers."""
        law = self._goal.law
        covered = [each for momentum in law.momenta if law.covers(each := replace(mode, momentum=momentum))]
        if not covered:
            return
        interval, overlap = mode.interval_steps, 0
        if mode.method == STREAMING:
            # As much as hides a fragment, also while links with traces are slow.
            slowest_s = max(inner_s)
            needed = ceil(times.longest_s / slowest_s) if slowest_s else 0
            overlap = most_overlap(mode) if self._varies else min(needed, most_overlap(mode))
        # Steps take as long with every momentum.
        step_s = times.step_s(inner_s, interval, outer_settings(mode, overlap))
        for each in covered:
            outer = outer_settings(each, overlap, exchange)
            how = Synchronisation(mode.method, interval_steps=interval, outer=outer)
            plan = replace(base, synchronisation=how)
            yield from self._able(plan, each, tuple(inner_s), step_s, times.traffic_price / interval)

    def over_traces(self, found: Sequence[LossPlan]) -> list[LossPlan]:
        """Return the best plan of each method, interval and number of fragments, with the times over the traces.

        All plans that sum gradients are among them. Without traces, and in large clusters, times are those at the
        declared rates.
        """
        if not self._varies:
            return list(found)
        best: dict[Plan | tuple[str, int, int], LossPlan] = {}
        for each in found:
            mode = each.mode
            key = each.plan if mode.method == ALLREDUCE else (mode.method, mode.interval_steps, mode.fragments)
            if key not in best or self.score(each) < self.score(best[key]):
                best[key] = each
        return [timed for each in best.values() if self._keeps_limits(timed := self._over_traces(each))]

    def _over_traces(self, each: LossPlan) -> LossPlan:
        how = each.plan.synchronisation

        def step_s(plan: Plan, window: Scenario) -> float:
            if not how.has_outer_step:
                return contended_step_time_s(plan, window)
            times = ExchangePaths(plan, window).times(how.outer)
            return times.step_s(each.worker_steps_s, how.interval_steps, how.outer)

        return replace(each, step_s=mean_step_s(each.plan, self._scenario, step_s, _WINDOW_S))

    def _able(
        self, plan: Plan, mode: TrainingMode, worker_steps_s: tuple[float, ...], step_s: float, exchange_price: float
    ) -> Iterator[LossPlan]:
        self.judged += 1
        if mode not in self._steps:
            self._steps[mode] = self._goal.law.steps_to(self._goal.loss, mode)
        per_hour = sum(self._scenario.cluster.by_name[device].price_per_hour for device in plan.devices)
        traffic = traffic_price(plan, self._scenario) + exchange_price
        found = LossPlan(plan, mode, self._steps[mode], worker_steps_s, step_s, per_hour, traffic)
        if found.steps.converges and self._keeps_limits(found):
            yield found

    def _keeps_limits(self, each: LossPlan) -> bool:
        return self._goal.are_kept(each.plan.global_batch, each.step_s, each.step_price)

    def _plan(self, made: Sequence[TimedPipeline], schedule: str) -> Plan:
        pipelines = tuple(each.pipeline for each in made)
        name = self._scenario.name, self._scenario.model.name
        return Plan(*name, _NAME, schedule, pipelines, synchronisation=Synchronisation(DILOCO))

    def _timed(self, workers: Sequence[Worker], schedules: Sequence[str]) -> dict[str, list[TimedPipeline]]:
        """Return the workers' pipelines by each schedule with which they fit into memory."""
        batch = self._scenario.training.global_batch
        made = {schedule: side_by_side(workers, batch, schedule) for schedule in schedules}
        return {schedule: pipelines for schedule, pipelines in made.items() if pipelines is not None}

    def _worker_sets(self) -> Iterator[tuple[list[Worker], Sequence[str]]]:
        """Yield sets of two workers or more, on different regions, and the schedules to try."""
        regions = sorted(self._scenario.cluster.regions)
        if len(regions) <= MOST_REGIONS:
            for blocks in partial_partitions(regions):
                workers = [self._workers.worker(block) for block in blocks]
                if len(blocks) > 1 and None not in workers:
                    yield [worker for worker in workers if worker is not None], SCHEDULES
            return
        able = [worker for region in regions if (worker := self._workers.worker((region,))) is not None]
        if len(able) < 2:
            return
        able.sort(key=lambda worker: -worker.samples_per_s)
        # Each number of samples that a schedule is tried with takes a search of its own.
        made = self._timed(able, SCHEDULES)
        quickest = min(made, key=lambda name: max(each.step_s for each in made[name]), default=None)
        schedules = SCHEDULES if quickest is None else (quickest,)
        numbers = range(len(able))
        if len(regions) <= _MOST_SUBSETS and len(self._scenario.cluster.devices) <= _MOST_TIMED:
            sets = [each for count in numbers[1:] for each in combinations(numbers, count + 1)]
        else:
            sets = [(*numbers[: count + 1],) for count in numbers[1:]]
            sets += [(*numbers[:number], *numbers[number + 1 :]) for number in numbers]
            if quickest is not None:
                paths = ExchangePaths(self._plan(made[quickest], quickest), self._scenario)
                sets += without_slowest_links(paths.times(OuterStep()).between_s)
        for each in dict.fromkeys(sets):
            if len(each) > 1:
                yield [able[number] for number in each], schedules


def _summed(scenario: Scenario, goal: LossGoal) -> tuple[list[Plan], InputError | None]:
    """Return plans that sum gradients in every step, and why there is none for all regions, if so."""
    regions = scenario.cluster.regions
    if len(regions) <= MOST_SUMMED:
        sets = [each for count in range(1, len(regions) + 1) for each in combinations(regions, count)]
    else:
        # The search leaves out regions that make steps longer, but not those that only make them dearer.
        is_cheap = goal.name == COST or goal.budget_per_hour is not None
        sets = [*((region,) for region in regions if is_cheap), tuple(regions)]
    plans, failure = [], None
    for each in sets:
        try:
            plans.append(plan_for(within_regions(scenario, each), Objective()))
        except InputError as error:
            failure = error
    return plans, failure
