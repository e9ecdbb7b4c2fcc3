"""Strategies ``asteroid`` and ``asteroid-duplex``: one pipeline whose stages are groups of devices of limited memory.

Asteroid (arXiv 2408.08015, MobiCom 2024) sorts the devices by memory, largest first. Each stage is held by a group of
consecutive devices in this order, which divide every microbatch so that all finish together
(`planner.systems.asteroid.stage_costs`). Of all splits of layers and devices into stages, the one with the least round
latency (`planner.systems.asteroid.round_latency`) is chosen. Stage p of P, counted from 0, keeps up to 2(P - p) - 1
microbatches in flight, as if each communication were a stage of its own. These rules follow other publications that
describe the paper.

The search (Algorithm 2 of the paper) builds pipelines from the last stage to the first by dynamic programming. A state
is a split of the last l layers over the last n devices into p stages; one more stage and its communication are put in
front. As others describe it, the paper keeps only the fastest split of each state, although the fastest pipeline need
not end with it. Our search is exact: of splits with the same rates from all remaining devices to their first group, it
keeps every one that is not worse than another in both terms of the round latency, V and U. Splits slower than a
complete pipeline already found are dropped, since more stages never shorten a round.

Assumption: devices with equal memory stay in the cluster's order; a device to which Algorithm 1 gives no samples is
left out of its group; the size of microbatches, an input in the paper, is the scenario's.

``asteroid-duplex`` is our variant, with the round latency corrected for full-duplex links.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from planner.cost.in_flight import fitting_depths, no_split_fits
from planner.plan.microbatches import even_microbatches
from planner.plan.plan import Pipeline, Plan
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.round_latency import NO_STEPS, RoundTail, busy_s, least_rate_bps, prepend, transfer_step
from planner.systems.asteroid.stage_costs import StageChoice, StageCosts


def asteroid_depth(stages: int) -> int:
    """Return the number of microbatches in flight at a stage by Asteroid's rule.

    ``stages`` is the number of stages from this one to the last. The rule counts each communication as a stage too.
    """
    return 2 * stages - 1


def plain_depth(stages: int) -> int:
    """Return the number of microbatches in flight at a stage by 1F1B's rule; see `asteroid_depth`."""
    return stages


@dataclass(frozen=True, slots=True)
class HybridRules:
    """The rules in which the planners that use this search differ.

    Attributes:
        depth: Rule for the microbatches in flight at a stage: `asteroid_depth` or `plain_depth`.
        duplex: Whether the round latency is corrected for full-duplex links.
        widest: Most devices of a group; None for no limit.
        even: Whether the devices of a group take equal shares, as far as memory allows, in place of Algorithm 1's.
        longest_s: Round latency from which a split is not worth keeping, seconds.
    """

    depth: Callable[[int], int] = asteroid_depth
    duplex: bool = False
    widest: int | None = None
    even: bool = False
    longest_s: float = inf


@dataclass(frozen=True, slots=True)
class HybridSplit:
    """The last stages of a pipeline that the search builds, or all of its stages.

    Attributes:
        tail: Round latency of these stages.
        stages: The stages, first to last.
    """

    tail: RoundTail
    stages: tuple[StageChoice, ...]


# How much longer than the best round a stage may take before longer ranges of layers are not looked at: the samples
# that Algorithm 1 gives the devices differ from range to range, so that a longer one may take a little less time.
_MARGIN = 1.25

# Splits by (index of their first layer, index of their first device, rates from each earlier device to their first
# group in bits per second).
_Splits = dict[tuple[int, int, tuple[float, ...]], list[HybridSplit]]


def counted_split(
    scenario: Scenario,
    devices: Sequence[Device],
    samples: int,
    microbatches: int,
    rules: HybridRules,
    costs: StageCosts | None = None,
) -> tuple[HybridSplit | None, int]:
    """Return the split of all layers with the least round latency, and the number of candidate stages looked at.

    The split is None if none fits into memory.

    Args:
        scenario: Scenario that gives model, memory and links.
        devices: Devices in the order along the pipeline.
        samples: Samples of each microbatch.
        microbatches: Number of microbatches of the round.
        rules: Depths, correction and width of groups.
        costs: Those of earlier searches with the same scenario, samples and rules.
    """
    costs = costs or StageCosts(scenario, samples, rules.even)
    looked_up = costs.choose.cache_info()
    before = looked_up.hits + looked_up.misses
    search = _Search(scenario, costs, samples, tuple(devices), microbatches, rules)
    best: HybridSplit | None = None
    layers = len(scenario.model.layers)
    longest_s = rules.longest_s
    splits: _Splits = {(layers, len(devices), ()): [HybridSplit(NO_STEPS, ())]}
    for stages in range(1, min(layers, len(devices)) + 1):
        longer = search.one_more_stage(splits, stages, longest_s)
        complete = [each for (layer, device, _), kept in longer.items() if not layer and not device for each in kept]
        best = min([*complete, *([best] if best else [])], key=lambda each: each.tail.latency_s, default=None)
        longest_s = min(longest_s, best.tail.latency_s if best is not None else inf)
        splits = {key: _worth_keeping(kept, longest_s) for key, kept in longer.items()}
    looked_up = costs.choose.cache_info()
    return best, looked_up.hits + looked_up.misses - before


def hybrid_plan(scenario: Scenario, devices: Sequence[Device], strategy: str, rules: HybridRules) -> Plan:
    """Return the plan of one pipeline over ``devices``, in this order, with the least round latency.

    Raises:
        InputError: No split fits into memory, even with one sample per microbatch.
    """
    return counted_plan(scenario, devices, strategy, rules)[0]


def counted_plan(scenario: Scenario, devices: Sequence[Device], strategy: str, rules: HybridRules) -> tuple[Plan, int]:
    """Return the result of `hybrid_plan`, and the number of candidate stages that its searches have looked at."""
    pipeline, candidates = _counted_pipeline(scenario, devices, scenario.training.global_batch, rules)
    if pipeline is None:
        raise no_split_fits(scenario, strategy, devices)
    return Plan(scenario.name, scenario.model.name, strategy, "1f1b", (pipeline,)), candidates


def hybrid_pipeline(scenario: Scenario, devices: Sequence[Device], batch: int, rules: HybridRules) -> Pipeline | None:
    """Return the pipeline with the least round latency for a batch of ``batch`` samples, or None if none fits.

    Assumption: microbatches are those of `even_microbatches`, halved until some split fits into memory.
    """
    return _counted_pipeline(scenario, devices, batch, rules)[0]


def _counted_pipeline(
    scenario: Scenario, devices: Sequence[Device], batch: int, rules: HybridRules
) -> tuple[Pipeline | None, int]:
    candidates = 0
    for microbatches in _microbatch_sizes(scenario, batch, len(devices)):
        split, tried = counted_split(scenario, devices, max(microbatches), len(microbatches), rules)
        candidates += tried
        if split is not None:
            stages = tuple(choice.stage for choice in split.stages)
            depths = fitting_depths([stage.in_flight for stage in stages], stages, scenario, microbatches)
            assert depths is not None, "`counted_split` returns only splits that fit into memory"
            return Pipeline(stages, microbatches).with_depths(depths), candidates
    return None, candidates


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
    scenario: Scenario
    costs: StageCosts
    samples: int
    devices: tuple[Device, ...]
    microbatches: int
    rules: HybridRules

    def one_more_stage(self, splits: _Splits, stages: int, longest_s: float) -> _Splits:
        """Return ``splits`` with every possible stage put in front of each, which makes ``stages`` stages.

        Splits of ``longest_s`` and more are not needed.
        """
        longer: _Splits = {}
        for (middle, device, _), kept in splits.items():
            for first_device in range(max(0, device - self._widest), device):
                for choice in self._choices(middle, first_device, device, stages, longest_s):
                    found = longer.setdefault(self._key(choice, first_device), [])
                    found += [self._extended(choice, split) for split in kept]
        return longer

    def _choices(self, end: int, device: int, end_device: int, stages: int, longest_s: float) -> list[StageChoice]:
        """Return the stages that end before layer ``end`` on these devices, longest first.

        The first devices hold the first layers, and others leave some. A stage that does not fit into memory, or takes
        much longer than ``longest_s``, has no longer ones beside it.
        """
        found: list[StageChoice] = []
        for layer in reversed(range(1, end)) if device else (0,):
            choice = self._choose(layer, end, device, end_device, stages)
            if choice is None:
                break
            least_s = busy_s(choice.step, self.microbatches, self.rules.duplex)
            if least_s > _MARGIN * longest_s:
                break
            # Longer ranges may have shorter sums of gradients, if they leave a device of the group without samples.
            if least_s + choice.step.sync_s < longest_s:
                found.append(choice)
        return found[::-1]

    def _extended(self, choice: StageChoice, split: HybridSplit) -> HybridSplit:
        tail = split.tail
        if split.stages:
            ends = [tuple(device for device, _ in each.samples) for each in (choice, split.stages[0])]
            transfer = transfer_step(self.scenario, choice.end_layer, self.samples, *ends)
            tail = prepend(transfer, tail, self.microbatches, self.rules.duplex)
        tail = prepend(choice.step, tail, self.microbatches, self.rules.duplex)
        return HybridSplit(tail, (choice, *split.stages))

    def _choose(self, layer: int, end: int, device: int, end_device: int, stages: int) -> StageChoice | None:
        depth = min(self.rules.depth(stages), self.microbatches)
        return self.costs.choose(layer, end, self.devices[device:end_device], depth)

    def _key(self, choice: StageChoice, device: int) -> tuple[int, int, tuple[float, ...]]:
        group = tuple(name for name, _ in choice.samples)
        rates_bps = tuple(least_rate_bps(self.scenario, (before.name,), group) for before in self.devices[:device])
        return choice.first_layer, device, rates_bps

    @property
    def _widest(self) -> int:
        return self.rules.widest or len(self.devices)


def _worth_keeping(splits: Iterable[HybridSplit], longest_s: float) -> list[HybridSplit]:
    """Return the splits below ``longest_s`` without those that another split matches or beats in both V and U.

    V and U are the two terms of the round latency. Of splits with equal V and U, one is kept.
    """
    kept: list[HybridSplit] = []
    latest_s = inf
    for split in sorted(splits, key=lambda each: (each.tail.dominated_s, each.tail.late_sync_s)):
        if split.tail.late_sync_s < latest_s and split.tail.latency_s < longest_s:
            latest_s = split.tail.late_sync_s
            kept.append(split)
    return kept


def asteroid(scenario: Scenario) -> Plan:
    """Return Asteroid's plan: one pipeline over all devices, with the round latency as published.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(scenario, by_memory(scenario.cluster.devices), "asteroid", HybridRules())


def asteroid_duplex(scenario: Scenario) -> Plan:
    """Return Asteroid's plan with the round latency corrected for full-duplex links.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(scenario, by_memory(scenario.cluster.devices), "asteroid-duplex", HybridRules(duplex=True))


def by_memory(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices sorted by memory, largest first."""
    return tuple(sorted(devices, key=lambda device: -device.memory_bytes))
