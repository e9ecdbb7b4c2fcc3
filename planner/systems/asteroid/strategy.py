"""Asteroid: hybrid pipelines on unlike devices of limited memory (arXiv 2408.08015, MobiCom 2024).

Devices by memory, largest first; groups of neighbours in this order are stages; inside a group every microbatch is
shared out so that all are done at the same time (`planner.systems.asteroid.stage_costs`); the split with the least
round latency wins (`planner.systems.asteroid.strategy`, `planner.systems.asteroid.round_latency`) [all second-hand].
Stage p of P, counted from 0, keeps K_p = 2(P - p) - 1 microbatches in flight, as if communication were a stage of its
own.

Assumed: devices with equal memory stay in the cluster's order; a device that Algorithm 1 gives no sample is left out;
the size of microbatches, which the paper takes as given, is the scenario's.

``asteroid-duplex`` is ours: the same planner, which knows that links carry both directions at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from planner.cost.in_flight import fitting_depths, no_split_fits
from planner.plan.microbatches import even_microbatches
from planner.plan.plan import Pipeline, Plan
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.round_latency import RoundTail, prepend
from planner.systems.asteroid.stage_costs import StageChoice, StageCosts


def asteroid_depth(stages: int) -> int:
    """Return the microbatches in flight at a stage with so many stages from it to the last: K_p = 2(P - p) - 1.

    Communication counts as a step of the pipeline [second-hand].
    """
    return 2 * stages - 1


def plain_depth(stages: int) -> int:
    """Return the same without communication: K_p = P - p."""
    return stages


@dataclass(frozen=True, slots=True)
class HybridRules:
    """What a planner of hybrid pipelines counts on.

    Attributes:
        depth: Number of stages from one to the last, itself included, to its microbatches in flight.
        duplex: Whether rounds are judged with the correction for full duplex.
        widest: Most devices in a group; None for any number.
    """

    depth: Callable[[int], int] = asteroid_depth
    duplex: bool = False
    widest: int | None = None


@dataclass(frozen=True, slots=True)
class HybridSplit:
    """The last stages of a pipeline, or all of them.

    Attributes:
        tail: What their steps amount to.
        stages: In order.
    """

    tail: RoundTail
    stages: tuple[StageChoice, ...]


# (first layer, first device, rates at which the devices before reach the first group) to the ways worth keeping.
_Ways = dict[tuple[int, int, tuple[float, ...]], list[HybridSplit]]


def best_split(
    scenario: Scenario, devices: Sequence[Device], samples: int, microbatches: int, rules: HybridRules
) -> HybridSplit | None:
    """Return the split with the least round latency, or None if none fits.

    Args:
        scenario: Gives model, memory and links.
        devices: All of which the groups together hold, in order.
        samples: Of each microbatch.
        microbatches: Of the round.
        rules: What the planner counts on.
    """
    search = _Search(StageCosts(scenario, samples), len(scenario.model.layers), tuple(devices), microbatches, rules)
    best: HybridSplit | None = None
    ways: _Ways = {}
    for stages in range(1, min(search.layers, len(devices)) + 1):
        longer = search.last_stages() if stages == 1 else search.one_more_stage(ways, stages)
        complete = [way for (layer, device, _), kept in longer.items() if not layer and not device for way in kept]
        best = min([*complete, *([best] if best else [])], key=lambda way: way.tail.latency_s, default=None)
        ways = {key: _worth_keeping(kept, best) for key, kept in longer.items()}
    return best


def hybrid_plan(scenario: Scenario, devices: Sequence[Device], strategy: str, rules: HybridRules) -> Plan:
    """Return the plan of one pipeline with the best split.

    Assumed: microbatches of the scenario's size, or of `even_microbatches`, and half as large until some split fits.

    Args:
        scenario: What the plan is for.
        devices: As `best_split` takes them.
        strategy: Its name.
        rules: What the planner counts on.

    Raises:
        InputError: No split fits, even one sample at a time.
    """
    batch = scenario.training.global_batch
    pipeline = hybrid_pipeline(scenario, devices, batch, rules)
    if pipeline is None:
        raise no_split_fits(scenario, strategy, devices)
    return Plan(scenario.name, scenario.model.name, strategy, "1f1b", (pipeline,))


def hybrid_pipeline(scenario: Scenario, devices: Sequence[Device], batch: int, rules: HybridRules) -> Pipeline | None:
    """Return the pipeline with the best split of a batch, or None; see `hybrid_plan`."""
    for microbatches in _microbatch_sizes(scenario, batch, len(devices)):
        split = best_split(scenario, devices, max(microbatches), len(microbatches), rules)
        if split is not None:
            stages = tuple(choice.stage for choice in split.stages)
            depths = fitting_depths([stage.in_flight for stage in stages], stages, scenario, microbatches)
            assert depths is not None, "the split was checked against memory"
            stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(stages, depths, strict=True))
            return Pipeline(stages, microbatches)
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

    def last_stages(self) -> _Ways:
        """All ways to end a pipeline."""
        ways: _Ways = {}
        count = len(self.devices)
        for device in range(max(0, count - self._widest), count):
            for layer in range(self.layers):
                choice = self._choose(layer, self.layers, device, count, 1)
                if choice is not None:
                    tail = prepend(choice.step, None, self.microbatches, self.rules.duplex)
                    ways[self._key(choice, device)] = [HybridSplit(tail, (choice,))]
        return ways

    def one_more_stage(self, ways: _Ways, stages: int) -> _Ways:
        """All ways with one stage before those of ``ways``, which makes so many."""
        longer: _Ways = {}
        for (middle, device, _), kept in ways.items():
            for first_device in range(max(0, device - self._widest), device):
                # Whatever comes before needs a layer and a device for each stage.
                for layer in range(middle):
                    choice = self._choose(layer, middle, first_device, device, stages)
                    if choice is not None:
                        found = longer.setdefault(self._key(choice, first_device), [])
                        found += [self._extended(choice, way) for way in kept]
        return longer

    def _extended(self, choice: StageChoice, way: HybridSplit) -> HybridSplit:
        ends = [tuple(device for device, _ in each.samples) for each in (choice, way.stages[0])]
        transfer = self.costs.transfer(choice.end_layer, *ends)
        tail = prepend(transfer, way.tail, self.microbatches, self.rules.duplex)
        tail = prepend(choice.step, tail, self.microbatches, self.rules.duplex)
        return HybridSplit(tail, (choice, *way.stages))

    def _choose(self, layer: int, end: int, device: int, end_device: int, stages: int) -> StageChoice | None:
        # The depth counts from the last stage: the first of so many stages is not number zero of the pipeline yet.
        depth = min(self.rules.depth(stages), self.microbatches)
        return self.costs.choose(layer, end, self.devices[device:end_device], depth)

    def _key(self, choice: StageChoice, device: int) -> tuple[int, int, tuple[float, ...]]:
        group = tuple(name for name, _ in choice.samples)
        rates_bps = tuple(self.costs.least_rate_bps((before.name,), group) for before in self.devices[:device])
        return choice.first_layer, device, rates_bps

    @property
    def _widest(self) -> int:
        return self.rules.widest or len(self.devices)


def _worth_keeping(ways: Iterable[HybridSplit], best: HybridSplit | None) -> list[HybridSplit]:
    """Those that are shorter than the best, and that no other beats in one term without being worse in the other."""
    longest_s = best.tail.latency_s if best is not None else inf
    kept: list[HybridSplit] = []
    latest_s = inf
    for way in sorted(ways, key=lambda each: (each.tail.dominated_s, each.tail.late_sync_s)):
        if way.tail.late_sync_s < latest_s and way.tail.latency_s < longest_s:
            latest_s = way.tail.late_sync_s
            kept.append(way)
    return kept


def asteroid(scenario: Scenario) -> Plan:
    """Return one pipeline of groups, as published.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(scenario, by_memory(scenario.cluster.devices), "asteroid", HybridRules())


def asteroid_duplex(scenario: Scenario) -> Plan:
    """Return one pipeline of groups, judged with the correction for full duplex.

    Raises:
        InputError: No split fits into memory.
    """
    return hybrid_plan(scenario, by_memory(scenario.cluster.devices), "asteroid-duplex", HybridRules(duplex=True))


def by_memory(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices with the largest memory first."""
    return tuple(sorted(devices, key=lambda device: -device.memory_bytes))
