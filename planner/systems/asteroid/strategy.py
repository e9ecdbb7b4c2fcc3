"""Asteroid: hybrid pipelines on unlike devices of limited memory (arXiv 2408.08015, MobiCom 2024).

Devices are sorted by memory, largest first. A stage is a group of consecutive devices in this order, data parallel
inside; every microbatch is divided so that all devices of a group finish together
(`planner.systems.asteroid.stage_costs`). The split of layers and devices into stages has the least round latency
(`planner.systems.asteroid.round_latency`). The paper's Algorithm 2 finds it by dynamic programming: Q(l, n, p) is the
split of the last l layers over the last n devices in p stages with the least latency. A split is extended by one
execution and one communication step in front, and dropped if its first stage does not fit into memory. Stage p of P,
counted from 0, keeps K_p = 2(P - p) - 1 microbatches in flight, as if communication were a stage of its own [all
second-hand].

The published recursion keeps one split for each (l, n, p) [second-hand], although the fastest last stages need not be
part of the fastest pipeline. Ours compares splits only if the remaining devices reach their first groups at equal
rates, and keeps every split that no other one beats in both terms of the round latency, V and U. As both terms are
monotone, the result is the optimum over all splits and groups. An additional step in front never shortens a round, so
splits slower than a known complete pipeline are dropped.

Assumed: devices with equal memory stay in the cluster's order; a device to which Algorithm 1 gives no samples is left
out; the microbatch size, which the paper takes as given, is the scenario's.

``asteroid-duplex`` is ours: the same planner with the correction for links that carry both directions at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from planner.cost.in_flight import fitting_depths, no_split_fits
from planner.plan.microbatches import even_microbatches
from planner.plan.plan import Pipeline, Plan
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.round_latency import RoundTail, prepend
from planner.systems.asteroid.stage_costs import StageChoice, StageCosts


def asteroid_depth(stages: int) -> int:
    """Return the microbatches in flight of a stage, K_p = 2(P - p) - 1 [second-hand].

    The formula counts communication as a stage of its own. ``stages`` is P - p, the number of stages from this one to
    the last.
    """
    return 2 * stages - 1


def plain_depth(stages: int) -> int:
    """Return 1F1B's microbatches in flight of a stage, K_p = P - p. See `asteroid_depth` for the argument."""
    return stages


@dataclass(frozen=True, slots=True)
class HybridRules:
    """The rules of a planner of hybrid pipelines.

    Attributes:
        depth: Function that returns a stage's microbatches in flight from P - p, the number of stages from this one to
            the last.
        duplex: Whether the round latency is corrected for full duplex.
        widest: Limit on the devices in a group; None for no limit.
    """

    depth: Callable[[int], int] = asteroid_depth
    duplex: bool = False
    widest: int | None = None


@dataclass(frozen=True, slots=True)
class HybridSplit:
    """The last stages of a pipeline, or all stages.

    Attributes:
        tail: Round latency of these stages, as the terms V and U.
        stages: Layers and groups of the stages, first to last.
    """

    tail: RoundTail
    stages: tuple[StageChoice, ...]


# (index of the first layer, index of the first device, rates from each earlier device to the first group) to splits.
_Splits = dict[tuple[int, int, tuple[float, ...]], list[HybridSplit]]


def best_split(
    scenario: Scenario, devices: Sequence[Device], samples: int, microbatches: int, rules: HybridRules
) -> HybridSplit | None:
    """Return the split with the least round latency, or None if no split fits into memory.

    Args:
        scenario: Scenario that gives model, memory and links.
        devices: Devices in the order along the pipeline; every one belongs to a group.
        samples: Samples of each microbatch.
        microbatches: Number of microbatches of the round.
        rules: Rules of the planner.
    """
    search = _Search(StageCosts(scenario, samples), len(scenario.model.layers), tuple(devices), microbatches, rules)
    best: HybridSplit | None = None
    splits: _Splits = {}
    for stages in range(1, min(search.layers, len(devices)) + 1):
        longer = search.last_stages() if stages == 1 else search.one_more_stage(splits, stages)
        complete = [each for (layer, device, _), kept in longer.items() if not layer and not device for each in kept]
        best = min([*complete, *([best] if best else [])], key=lambda each: each.tail.latency_s, default=None)
        splits = {key: _worth_keeping(kept, best) for key, kept in longer.items()}
    return best


def hybrid_plan(scenario: Scenario, devices: Sequence[Device], strategy: str, rules: HybridRules) -> Plan:
    """Return the plan of one pipeline with the least round latency.

    Assumed: microbatches are those of `even_microbatches`, halved until some split fits into memory.

    Args:
        scenario: Scenario that the plan is for.
        devices: Devices in the order along the pipeline.
        strategy: Name of the strategy in the plan.
        rules: Rules of the planner.

    Raises:
        InputError: No split fits, even one sample at a time.
    """
    batch = scenario.training.global_batch
    pipeline = hybrid_pipeline(scenario, devices, batch, rules)
    if pipeline is None:
        raise no_split_fits(scenario, strategy, devices)
    return Plan(scenario.name, scenario.model.name, strategy, "1f1b", (pipeline,))


def hybrid_pipeline(scenario: Scenario, devices: Sequence[Device], batch: int, rules: HybridRules) -> Pipeline | None:
    """Return the pipeline with the least round latency for a batch, None if none fits; see `hybrid_plan`."""
    for microbatches in _microbatch_sizes(scenario, batch, len(devices)):
        split = best_split(scenario, devices, max(microbatches), len(microbatches), rules)
        if split is not None:
            stages = tuple(choice.stage for choice in split.stages)
            depths = fitting_depths([stage.in_flight for stage in stages], stages, scenario, microbatches)
            assert depths is not None, "the split was checked against memory"
            return Pipeline(stages, microbatches).with_depths(depths)
    return None


def _microbatch_sizes(scenario: Scenario, batch: int, devices: int) -> Iterator[tuple[int, ...]]:
    first = even_microbatches(scenario, batch, devices)
    yield first
    size = min(max(first), batch)
    while size > 1:
        size //= 2
        whole, rest = divmod(batch, size)
        yield (size,) * whole + ((rest,) if rest else ())


@dataclass(frozen=True, slots=True)
class _Search:
    costs: StageCosts
    layers: int
    devices: tuple[Device, ...]
    microbatches: int
    rules: HybridRules

    def last_stages(self) -> _Splits:
        """Return all splits into one stage."""
        splits: _Splits = {}
        count = len(self.devices)
        for device in range(max(0, count - self._widest), count):
            for layer in range(self.layers):
                choice = self._choose(layer, self.layers, device, count, 1)
                if choice is not None:
                    tail = prepend(choice.step, None, self.microbatches, self.rules.duplex)
                    splits[self._key(choice, device)] = [HybridSplit(tail, (choice,))]
        return splits

    def one_more_stage(self, splits: _Splits, stages: int) -> _Splits:
        """Return all splits into ``stages`` stages whose stages after the first are one of ``splits``."""
        longer: _Splits = {}
        for (middle, device, _), kept in splits.items():
            for first_device in range(max(0, device - self._widest), device):
                # `range` ends before `middle`, since a stage has one layer or more.
                for layer in range(middle):
                    choice = self._choose(layer, middle, first_device, device, stages)
                    if choice is not None:
                        found = longer.setdefault(self._key(choice, first_device), [])
                        found += [self._extended(choice, split) for split in kept]
        return longer

    def _extended(self, choice: StageChoice, split: HybridSplit) -> HybridSplit:
        ends = [tuple(device for device, _ in each.samples) for each in (choice, split.stages[0])]
        transfer = self.costs.transfer(choice.end_layer, *ends)
        tail = prepend(transfer, split.tail, self.microbatches, self.rules.duplex)
        tail = prepend(choice.step, tail, self.microbatches, self.rules.duplex)
        return HybridSplit(tail, (choice, *split.stages))

    def _choose(self, layer: int, end: int, device: int, end_device: int, stages: int) -> StageChoice | None:
        # `depth` takes the number of stages up to the last, since the number of stages in front is not known yet.
        depth = min(self.rules.depth(stages), self.microbatches)
        return self.costs.choose(layer, end, self.devices[device:end_device], depth)

    def _key(self, choice: StageChoice, device: int) -> tuple[int, int, tuple[float, ...]]:
        group = tuple(name for name, _ in choice.samples)
        rates_bps = tuple(self.costs.least_rate_bps((before.name,), group) for before in self.devices[:device])
        return choice.first_layer, device, rates_bps

    @property
    def _widest(self) -> int:
        return self.rules.widest or len(self.devices)


def _worth_keeping(splits: Iterable[HybridSplit], best: HybridSplit | None) -> list[HybridSplit]:
    """Return the splits faster than ``best`` that are Pareto-optimal: no other split is as good in both V and U.

    Of splits with equal V and U, one is kept.
    """
    longest_s = best.tail.latency_s if best is not None else inf
    kept: list[HybridSplit] = []
    latest_s = inf
    for split in sorted(splits, key=lambda each: (each.tail.dominated_s, each.tail.late_sync_s)):
        if split.tail.late_sync_s < latest_s and split.tail.latency_s < longest_s:
            latest_s = split.tail.late_sync_s
            kept.append(split)
    return kept


def asteroid(scenario: Scenario) -> Plan:
    """Return Asteroid's plan as published: one hybrid pipeline over all devices.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(scenario, by_memory(scenario.cluster.devices), "asteroid", HybridRules())


def asteroid_duplex(scenario: Scenario) -> Plan:
    """Return Asteroid's plan with the round latency corrected for full duplex.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(scenario, by_memory(scenario.cluster.devices), "asteroid-duplex", HybridRules(duplex=True))


def by_memory(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices with the largest memory first."""
    return tuple(sorted(devices, key=lambda device: -device.memory_bytes))
