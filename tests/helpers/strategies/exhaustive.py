"""Every plan of a small scenario, by plain enumeration: what a search is held against."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import NamedTuple

from planner.cost.in_flight import fitting_depths, plain_depths
from planner.cost.network import nominal_path
from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES
from planner.step.evaluate import step_time_s
from planner.step.orders import hiding_depths

Groups = tuple[tuple[str, ...], ...]


# Schedule, order, and whether depths hide round trips.
WAYS = (("1f1b", "scheduled", False), ("1f1b", "scheduled", True), ("compact-zb", "dynamic", True))


class Timed(NamedTuple):
    """A plan and the seconds of its step."""

    step_s: float
    plan: Plan | None


def best_plan(scenario: Scenario, limit_s: float, most_pipelines: int = 2) -> Timed:
    """Return the best plan whose step takes less than ``limit_s``; that and no plan if there is none.

    All pipelines on all disjoint, ordered groups of devices, with every cut of the layers and every number of even
    microbatches; one of them, or two side by side with every division of the batch. Shares by speed or even, 1F1B's
    depths and such as hide round trips, in 1F1B's order and that of devices that choose for themselves. What a lower
    bound rules out is not built.
    """
    names = [device.name for device in scenario.cluster.devices]
    batch = scenario.training.global_batch
    best = Timed(limit_s, None)
    for chain in chains(names):
        for pipeline in pipelines(chain, scenario, batch, best.step_s):
            best = min(best, _timed((pipeline,), scenario, best.step_s), key=lambda each: each.step_s)
    if most_pipelines > 1:
        for one, other in _side_by_side(names):
            for samples in range(1, batch):
                firsts = list(pipelines(one, scenario, samples, best.step_s))
                seconds = list(pipelines(other, scenario, batch - samples, best.step_s)) if firsts else []
                for pair in ((first, second) for first in firsts for second in seconds):
                    best = min(best, _timed(pair, scenario, best.step_s), key=lambda each: each.step_s)
    return best


def chains(names: Sequence[str]) -> Iterator[Groups]:
    """Give every ordered sequence of disjoint groups of some of the devices."""
    for group in _subsets(names):
        yield (group,)
        rest = [name for name in names if name not in group]
        yield from ((group, *others) for others in chains(rest))


def pipelines(chain: Groups, scenario: Scenario, samples: int, limit_s: float) -> Iterator[Pipeline]:
    """Give every pipeline on groups of devices that may take less than ``limit_s``, with depths of one."""
    layers = len(scenario.model.layers)
    for cuts in combinations(range(1, layers), len(chain) - 1):
        bounds = list(pairwise([0, *cuts, layers]))
        for count in range(1, samples + 1):
            microbatches = even_cut(samples, count)
            built = {
                tuple(Stage(first, end, replicas, 1) for (first, end), replicas in zip(bounds, each, strict=True))
                for each in (
                    [_by_speed(group, scenario, microbatches[0]) for group in chain],
                    [_evenly(group, microbatches[0]) for group in chain],
                )
            }
            for stages in sorted(built, key=repr):
                pipeline = Pipeline(stages, microbatches)
                if _least_s(pipeline, scenario) < limit_s:
                    yield pipeline


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(names) + 1):
        yield from combinations(names, count)


def _side_by_side(names: Sequence[str]) -> Iterator[tuple[Groups, Groups]]:
    for one in chains(names):
        taken = {name for group in one for name in group}
        rest = [name for name in names if name not in taken]
        # Of two orders of a pair one is enough.
        seconds = ((other, min(name for group in other for name in group)) for other in chains(rest))
        yield from ((one, other) for other, first in seconds if min(taken) < first)


def _by_speed(group: Sequence[str], scenario: Scenario, samples: int) -> tuple[Replica, ...]:
    """Each sample goes where it is done first; who gets none is left out."""
    layers, by_name = len(scenario.model.layers), scenario.cluster.by_name
    given = dict.fromkeys(group, 0)
    for _ in range(samples):
        ends_s = {name: scenario.model.times(0, layers, by_name[name].kind, given[name] + 1).total_s for name in group}
        given[min(group, key=ends_s.__getitem__)] += 1
    return tuple(Replica(name, share) for name, share in given.items() if share)


def _evenly(group: Sequence[str], samples: int) -> tuple[Replica, ...]:
    return tuple(Replica(name, 1.0) for name in group[:samples])


def _least_s(pipeline: Pipeline, scenario: Scenario) -> float:
    """A lower bound: each device computes all its samples after the first microbatch came to it, then sums."""
    model, by_name = scenario.model, scenario.cluster.by_name
    arrives_s = least_s = 0.0
    for number, stage in enumerate(pipeline.stages):
        passed_s, busy_s = [], []
        for index, replica in enumerate(stage.replicas):
            widths = [end - first for size in pipeline.microbatches for first, end in [stage.intervals(size)[index]]]
            times = [model.times(stage.first_layer, stage.end_layer, by_name[replica.device].kind, n) for n in widths]
            busy_s.append(sum(each.total_s for each in times))
            passed_s += [each.forward_s for each, width in zip(times, widths, strict=True) if width]
        least_s = max(least_s, arrives_s + max(busy_s) + _sum_s(stage, scenario))
        arrives_s += min(passed_s)
        if number + 1 < len(pipeline.stages):
            following = pipeline.stages[number + 1].replicas
            size = model.layers[stage.end_layer - 1].output_bytes
            paths = [nominal_path(scenario, a.device, b.device) for a in stage.replicas for b in following]
            arrives_s += min(path.latency_s + path.transmission_s(size) for path in paths)
    return least_s


def _sum_s(stage: Stage, scenario: Scenario) -> float:
    """A lower bound of a ring over the stage's devices: all of it but rounding."""
    names = [replica.device for replica in stage.replicas]
    if len(names) == 1:
        return 0.0
    numbers = scenario.model.parameter_bytes(stage.first_layer, stage.end_layer) // FLOAT32_BYTES
    part = numbers // len(names) * FLOAT32_BYTES
    paths = [nominal_path(scenario, one, other) for one, other in zip(names, [*names[1:], names[0]], strict=True)]
    return min(2 * (len(names) - 1) * (path.latency_s + (path.transmission_s(part) if part else 0.0)) for path in paths)


def _timed(pipelines: Sequence[Pipeline], scenario: Scenario, limit_s: float) -> Timed:
    """The best of a plan's depths and orders, or what is no better than the limit."""
    best = Timed(limit_s, None)
    for schedule, order, deep in WAYS:
        made = [_with_depths(each, scenario, deep) for each in pipelines]
        able = tuple(each for each in made if each is not None)
        if len(able) < len(made):
            return best
        plan = Plan(scenario.name, scenario.model.name, "exhaustive", schedule, able, order)
        step_s = step_time_s(plan, scenario)
        if step_s < best.step_s:
            best = Timed(step_s, plan)
    return best


def _with_depths(pipeline: Pipeline, scenario: Scenario, deep: bool) -> Pipeline | None:
    fitted = fitting_depths(plain_depths(len(pipeline.stages)), pipeline.stages, scenario, pipeline.microbatches)
    if fitted is None:
        return None
    depths = hiding_depths(pipeline, scenario) if deep else fitted
    stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(pipeline.stages, depths, strict=True))
    return replace(pipeline, stages=stages)
