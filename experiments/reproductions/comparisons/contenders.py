"""The contenders of a comparison: for each strategy, the plans that it can make with its knobs.

Every contender chooses devices and microbatches (`experiments.reproductions.comparisons.knobs`). Beyond that:

- ``megatron`` chooses the order of regions, the number of pipelines, and recomputation.
- ``regional pipelines``, a uniform pipeline in each region with data parallelism between them, chooses recomputation.
- ``gpipe`` chooses the order of regions, and recomputes where memory requires it.
- ``zb-h1-equal`` and ``pipedream`` choose the order of regions.
- ``dapple`` chooses the order of regions as listed or by memory, and recomputation.
- ``hetpipe`` chooses the number of its pipelines.
- ``asteroid`` and ``asteroid-duplex`` sort devices by memory, as their planner does.
- ``ddp`` chooses the number of microbatches, and whether gradient sums overlap with backward in PyTorch's buckets;
  ``lb-bsp`` and ``cannikin`` always overlap them, and divide the batch by speed.
- ``deepcee`` chooses everything by its own planner.

Tensor parallelism is left out for all of them: no two devices of these clusters share a host.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf

from experiments.reproductions.comparisons.knobs import (
    arranged,
    arrangements,
    memory_orders,
    microbatch_sizes,
    subsets,
)
from planner.check import is_possible
from planner.cost.in_flight import fitting_depths, plain_depths
from planner.plan.microbatches import even_cut, even_microbatches
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario, with_unlimited_memory
from planner.systems.asteroid.stage_costs import StageCosts, levelled
from planner.systems.asteroid.strategy import HybridRules, counted_split, plain_depth
from planner.systems.baselines.hybrid import hetpipe, pipedream
from planner.systems.baselines.uniform import ddp, gpipe, megatron_stages, uniform_pipelines, zb_equal
from planner.systems.cannikin.strategy import BUCKET_BYTES, cannikin, lb_bsp
from planner.systems.deepcee.strategy import deepcee
from traces.common.errors import InputError

Strategy = Callable[[Scenario], Plan]
Contender = Callable[[Scenario], Iterator[Plan]]

# A search for stages ends where its own closed form is this many times as long as for the best knobs so far.
SLACK = 1.5


def _made(strategy: Strategy, scenarios: Iterable[Scenario]) -> Iterator[Plan]:
    """Yield the plans of a strategy, without those that fit into no memory."""
    for each in scenarios:
        try:
            yield strategy(each)
        except InputError:
            continue


def _sized(scenario: Scenario, devices: Iterable[Sequence[Device]]) -> Iterator[Scenario]:
    """Yield the scenario with each of these sequences of devices, and each size of microbatches."""
    for each in devices:
        for size in microbatch_sizes(scenario):
            yield arranged(scenario, each, size)


def _searched(scenario: Scenario, devices: Iterable[Sequence[Device]]) -> Iterator[tuple[Sequence[Device], int]]:
    """Yield each of these sequences of devices with each size of microbatches that is worth a search for stages.

    There are at least as many microbatches as devices: with fewer, devices of a pipeline idle most of the time.
    """
    for each in devices:
        for size in microbatch_sizes(scenario, len(each)):
            yield each, size


def _recomputing(plan: Plan, scenario: Scenario) -> Plan:
    """Return the plan as it is if it fits into memory, else with recomputation in all stages."""
    if is_possible(plan, scenario):
        return plan
    return replace(plan, pipelines=tuple(_recomputed(pipeline) for pipeline in plan.pipelines))


def _recomputed(pipeline: Pipeline) -> Pipeline:
    return replace(pipeline, stages=tuple(replace(stage, recompute=True) for stage in pipeline.stages))


def _megatron(scenario: Scenario) -> Iterator[Plan]:
    for each in _sized(scenario, arrangements(scenario)):
        for stages in megatron_stages(each):
            for plan in _made(lambda one, stages=stages: uniform_pipelines(one, stages), [each]):  # type: ignore[misc]
                yield _recomputing(plan, each)


def _regional(scenario: Scenario) -> Iterator[Plan]:
    several = (each for each in subsets(scenario) if len({device.region for device in each}) > 1)
    for each in _sized(scenario, several):
        yield _recomputing(regional_pipelines(each), each)


def regional_pipelines(scenario: Scenario) -> Plan:
    """Return a plan with a uniform 1F1B pipeline in each region, each of which takes an equal part of the batch."""
    cluster, layers = scenario.cluster, len(scenario.model.layers)
    parts = even_cut(scenario.training.global_batch, len(cluster.regions))
    pipelines = []
    for region, samples in zip(cluster.regions, parts, strict=True):
        devices = [device.name for device in cluster.devices if device.region == region]
        count = len(devices)
        stages = tuple(
            Stage(layers * index // count, layers * (index + 1) // count, (Replica(devices[index]),), depth)
            for index, depth in enumerate(plain_depths(count))
        )
        pipelines.append(Pipeline(stages, even_microbatches(scenario, samples, count)))
    return Plan(scenario.name, scenario.model.name, "regional pipelines", "1f1b", tuple(pipelines))


def _in_any_order(strategy: Strategy) -> Contender:
    return lambda scenario: _made(strategy, _sized(scenario, arrangements(scenario)))


def _on_any_devices(strategy: Strategy) -> Contender:
    return lambda scenario: _made(strategy, _sized(scenario, subsets(scenario)))


def _hetpipe(scenario: Scenario) -> Iterator[Plan]:
    searched = _searched(scenario, subsets(scenario))
    return _made(hetpipe, (arranged(scenario, devices, size) for devices, size in searched))


def _ddp(scenario: Scenario) -> Iterator[Plan]:
    for devices in subsets(scenario):
        for plan in _made(ddp, [arranged(scenario, devices)]):
            yield plan
            yield replace(plan, synchronisation=replace(plan.synchronisation, bucket_bytes=BUCKET_BYTES))


class _Searches:
    """Runs Asteroid's search for many sets of devices and sizes of microbatches, and gives up those far behind.

    Args:
        scenario: Scenario to plan for.
        strategy: Name of the strategy in the plans.
        rules: Rules of the search.
    """

    def __init__(self, scenario: Scenario, strategy: str, rules: HybridRules) -> None:
        self._scenario = scenario
        self._strategy = strategy
        self._rules = rules
        self._least_s = inf
        self._costs = cache(lambda size: StageCosts(scenario, size, rules.even))

    def plans(self, orders: Iterable[Sequence[Device]], levels: bool = False) -> Iterator[Plan]:
        """Yield the plan for each order of devices and each size, if one fits into memory.

        With ``levels``, every device is counted as having the mean speed of those chosen.
        """
        for devices, size in _searched(self._scenario, orders):
            counted_on = levelled(arranged(self._scenario, devices)) if levels else self._scenario
            costs = None if levels else self._costs(size)
            count = self._scenario.training.global_batch // size
            rules = replace(self._rules, longest_s=SLACK * self._least_s)
            split, _ = counted_split(counted_on, devices, size, count, rules, costs)
            if split is not None:
                self._least_s = min(self._least_s, split.tail.latency_s)
                stages = tuple(choice.stage for choice in split.stages)
                names = self._scenario.name, self._scenario.model.name, self._strategy
                yield Plan(*names, "1f1b", (Pipeline(stages, (size,) * count),))


def asteroid_plans(
    scenario: Scenario,
    rules: HybridRules,
    strategy: str = "asteroid",
    levels: bool = False,
    orders: Iterable[Sequence[Device]] | None = None,
) -> Iterator[Plan]:
    """Yield the plans of Asteroid's planner with other rules, over all knobs.

    With ``levels``, every device is counted as having the mean speed of those chosen. ``orders`` are the sequences of
    devices to choose from; all if None.
    """
    return _Searches(scenario, strategy, rules).plans(memory_orders(scenario) if orders is None else orders, levels)


def _dapple(scenario: Scenario) -> Iterator[Plan]:
    rules = HybridRules(depth=plain_depth)
    orders = list(dict.fromkeys((*subsets(scenario), *memory_orders(scenario))))
    yield from _Searches(scenario, "dapple", rules).plans(orders, levels=True)
    endless = with_unlimited_memory(scenario)
    for plan in _Searches(endless, "dapple", rules).plans(subsets(endless), levels=True):
        (pipeline,) = (_recomputed(each) for each in plan.pipelines)
        depths = fitting_depths(
            [s.in_flight for s in pipeline.stages], pipeline.stages, scenario, pipeline.microbatches
        )
        if depths is not None:
            yield replace(plan, pipelines=(pipeline.with_depths(depths),))


CONTENDERS: Mapping[str, Contender] = {
    "megatron": _megatron,
    "regional pipelines": _regional,
    "ddp": _ddp,
    "lb-bsp": _on_any_devices(lb_bsp),
    "cannikin": _on_any_devices(cannikin),
    "gpipe": _in_any_order(gpipe),
    "zb-h1-equal": _in_any_order(zb_equal),
    "pipedream": _in_any_order(pipedream),
    "dapple": _dapple,
    "hetpipe": _hetpipe,
    "asteroid": lambda scenario: asteroid_plans(scenario, HybridRules()),
    "asteroid-duplex": lambda scenario: asteroid_plans(scenario, HybridRules(duplex=True), "asteroid-duplex"),
    "deepcee": lambda scenario: _made(deepcee, [scenario]),
}
