"""The pipeline with which one or a few regions train as a worker, for any number of samples a step.

A worker is a single pipeline, whose stages may have replicas, without tensor parallelism: what can be trained with
outer steps. It depends on its own regions alone, so that it stays the same if other regions are added.
"""

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from planner.check import is_possible
from planner.plan.microbatches import even_cut, proportional_parts
from planner.plan.plan import Pipeline, Plan
from planner.scenario.scenario import Scenario, within_regions
from planner.systems.auto.candidates.build import with_hiding_depths
from planner.systems.auto.canonical import canonical
from planner.systems.auto.objective import Objective, approximate_step_time_s, contended_step_time_s
from planner.systems.auto.search import candidates, search
from planner.systems.baselines.uniform import equal_stages
from traces.common.errors import InputError

# Schedules of plans of workers; all workers of a plan have the same one.
SCHEDULES = ("1f1b", "compact-zb")

# Most devices of a worker that the whole search of `auto` looks for; larger ones are the best candidate.
_MOST_SEARCHED = 12

_NAME = "auto"


@dataclass(frozen=True)
class _OnePipeline(Objective):
    """The throughput of plans that can be a worker."""

    def score(self, plan: Plan, step_s: float, scenario: Scenario) -> float:
        return super().score(plan, step_s, scenario) if _can_work(plan) else inf


@dataclass(frozen=True, slots=True)
class TimedPipeline:
    """A pipeline, and the time of its step on its own, seconds."""

    pipeline: Pipeline
    step_s: float


@dataclass(frozen=True, eq=False)
class _Alike:
    """The best pipeline of some regions for the whole batch, which those of alike regions follow.

    Attributes:
        part: The scenario of these regions alone.
        samples_per_s: Throughput with the whole batch.
        made: The quickest pipelines for fewer samples that have been asked for; None where none fits into memory.
    """

    part: Scenario
    pipeline: Pipeline
    samples_per_s: float
    made: dict[tuple[int, str], TimedPipeline | None] = field(default_factory=dict)

    def with_samples(self, samples: int, schedule: str) -> TimedPipeline | None:
        key = (samples, schedule)
        if key not in self.made:
            made = _cut(self.pipeline, _with_batch(self.part, samples), schedule)
            self.made[key] = min(made, key=lambda each: each.step_s, default=None)
        return self.made[key]


@dataclass(frozen=True, eq=False)
class Worker:
    """The best pipeline of some regions for the whole batch, by which others for fewer samples are made.

    Attributes:
        regions: Names of the regions.
    """

    regions: tuple[str, ...]
    _alike: _Alike
    _names: dict[str, str]

    @property
    def samples_per_s(self) -> float:
        """Throughput with the whole batch, by which samples are divided."""
        return self._alike.samples_per_s

    def with_samples(self, samples: int, schedule: str) -> TimedPipeline | None:
        """Return the worker's quickest pipeline for a number of samples; None if none fits into memory."""
        made = self._alike.with_samples(samples, schedule)
        return None if made is None else replace(made, pipeline=_renamed(made.pipeline, self._names))


class WorkerSearch:
    """Finds workers; regions that are alike get the same pipelines without another search."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._workers: dict[tuple[str, ...], Worker | None] = {}
        self._found: dict[Hashable, _Alike | None] = {}

    def worker(self, regions: tuple[str, ...]) -> Worker | None:
        """Return the worker of some regions; None if the model does not fit into them as one pipeline."""
        if regions not in self._workers:
            self._workers[regions] = self._search(regions)
        return self._workers[regions]

    def _search(self, regions: tuple[str, ...]) -> Worker | None:
        part = canonical(_with_batch(within_regions(self._scenario, regions), self._scenario.training.global_batch))
        likeness = _likeness(part)
        if likeness not in self._found:
            self._found[likeness] = _best_of(part)
        alike = self._found[likeness]
        if alike is None:
            return None
        names = [[device.name for device in each.cluster.devices] for each in (alike.part, part)]
        return Worker(regions, alike, dict(zip(*names, strict=True)))


def side_by_side(workers: Sequence[Worker], batch: int, schedule: str) -> list[TimedPipeline] | None:
    """Return pipelines of workers that together take a batch in the least time; None if one does not fit into memory.

    Samples are in proportion to the workers' throughput, first with the whole batch, then with their part of it.
    """
    if len(workers) > batch:
        return None
    rates = [worker.samples_per_s for worker in workers]
    best: list[TimedPipeline] | None = None
    for _ in range(2):
        parts = proportional_parts(batch, [1.0 if rate == inf else rate for rate in rates])
        made = [worker.with_samples(part, schedule) for worker, part in zip(workers, parts, strict=True)]
        found = [each for each in made if each is not None]
        if len(found) < len(workers):
            break
        if best is None or max(each.step_s for each in found) < max(each.step_s for each in best):
            best = found
        rates = [part / each.step_s if each.step_s else inf for part, each in zip(parts, found, strict=True)]
    return best


def _with_batch(scenario: Scenario, samples: int) -> Scenario:
    return replace(scenario, training=replace(scenario.training, global_batch=samples, batch=None))


def _can_work(plan: Plan) -> bool:
    return len(plan.pipelines) == 1 and all(replica.tensor_parallel == 1 for replica in plan.replicas)


def _best(part: Scenario) -> Plan | None:
    pool = [plan for plan in _pool(part) if _can_work(plan) and is_possible(plan, part)]
    if len(part.cluster.devices) > _MOST_SEARCHED:
        return min(pool, key=lambda plan: approximate_step_time_s(plan, part), default=None)
    try:
        return search(part, _OnePipeline(), seeds=pool)
    except InputError:
        return None


def _best_of(part: Scenario) -> _Alike | None:
    plan = _best(part)
    if plan is None:
        return None
    step_s = contended_step_time_s(plan, part)
    return _Alike(part, plan.pipelines[0], plan.global_batch / step_s if step_s else inf)


def _pool(part: Scenario) -> Iterator[Plan]:
    devices, layers = len(part.cluster.devices), len(part.model.layers)
    yield from candidates(part)
    yield from (equal_stages(part, count) for count in range(1, min(devices, layers) + 1) if devices % count == 0)


def _cut(pipeline: Pipeline, part: Scenario, schedule: str) -> Iterator[TimedPipeline]:
    """Yield the pipeline with the batch of ``part`` in different numbers of microbatches, and the time of a step."""
    samples, stages = part.training.global_batch, len(pipeline.stages)
    counts = {ceil(samples / max(pipeline.microbatches)), stages, 2 * stages, 4 * stages}
    for count in sorted({min(samples, count) for count in counts}):
        cut = replace(pipeline, microbatches=even_cut(samples, count), orders=())
        made = with_hiding_depths(cut, part)
        if made is None:
            continue
        plan = Plan(part.name, part.model.name, _NAME, schedule, (made,))
        if is_possible(plan, part):
            yield TimedPipeline(made, contended_step_time_s(plan, part))


def _renamed(pipeline: Pipeline, names: dict[str, str]) -> Pipeline:
    stages = tuple(
        replace(stage, replicas=tuple(replace(each, device=names[each.device]) for each in stage.replicas))
        for stage in pipeline.stages
    )
    return replace(pipeline, stages=stages)


def _likeness(part: Scenario) -> Hashable:
    """Return what two parts of a cluster have in common if they differ in names alone, with devices in one order."""
    cluster, compute = part.cluster, part.effects.compute
    numbers: dict[str, Hashable] = {}
    for kind, names in (
        ("region", [device.region for device in cluster.devices]),
        ("host", [device.machine for device in cluster.devices]),
        ("device", [device.name for device in cluster.devices]),
    ):
        numbers |= {name: (kind, number) for number, name in enumerate(dict.fromkeys(names))}
    devices = tuple(
        (each.kind, each.memory_bytes, each.price_per_hour, each.interface_bps, numbers[each.region], numbers[host])
        for each in cluster.devices
        for host in [each.machine]
    )
    links = (replace(link, source="", target="", trace=None) for link in cluster.links)
    ends = ((numbers[link.source], numbers[link.target]) for link in cluster.links)
    uneven: Collection[object] = (*compute.stragglers, *compute.slowdowns)
    own = tuple(each.name for each in cluster.devices) if uneven else ()
    return devices, frozenset(zip(ends, links, strict=True)), own
