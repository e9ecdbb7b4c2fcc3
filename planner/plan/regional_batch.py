"""The samples of a step's batch by the region that stores them, for scenarios whose regions own data.

A sample belongs to the region of the device that computes the first stage on it. Within a step the samples of a region
are numbered in the order of pipelines, microbatches and samples, so that a region trains on the same samples however
its own devices divide them.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from planner.plan.plan import Pipeline, Plan
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True, order=True)
class StoredPart:
    """The part of all training samples that a region stores; regions stand in the order of the scenario's ``data``.

    Attributes:
        before: Number of samples that earlier regions store.
        own: Number of samples that the region stores.
        whole: Number of samples that all regions store.
    """

    before: int
    own: int
    whole: int

    def bounds(self, size: int) -> tuple[int, int]:
        """Return first and end index (exclusive) of the region's part of a data set of ``size`` samples."""
        return size * self.before // self.whole, size * (self.before + self.own) // self.whole


@dataclass(frozen=True, slots=True)
class RegionalRun:
    """Consecutive samples of a step's batch that one region stores.

    Attributes:
        start: Index of the first sample in the batch.
        count: Number of samples.
        stored: The region's part of all samples.
        first: Index of the first sample among the region's samples of the step.
        per_step: Number of the region's samples of the step.
    """

    start: int
    count: int
    stored: StoredPart
    first: int
    per_step: int


def stored_parts(scenario: Scenario) -> dict[str, StoredPart]:
    """Return the part of all samples that each region stores, by region; empty if data are everywhere."""
    whole, before, parts = sum(scenario.data.values()), 0, {}
    for region, own in scenario.data.items():
        parts[region] = StoredPart(before, own, whole)
        before += own
    return parts


# Cached, because every device of a plan asks for it.
@lru_cache(maxsize=32)
def regional_runs(plan: Plan, scenario: Scenario) -> tuple[RegionalRun, ...]:
    """Return the runs of a step's batch in order; empty if data are everywhere.

    They are empty too if a device of a region without data reads samples, which real training refuses.
    """
    parts = stored_parts(scenario)
    if any(region not in parts for region, _ in _regions(plan, scenario)):
        return ()
    found: list[tuple[str, int, int, int]] = []
    counts: defaultdict[str, int] = defaultdict(int)
    start = 0
    for region, samples in _regions(plan, scenario):
        found.append((region, start, samples, counts[region]))
        counts[region] += samples
        start += samples
    return tuple(
        RegionalRun(start, samples, parts[region], first, counts[region]) for region, start, samples, first in found
    )


def _regions(plan: Plan, scenario: Scenario) -> Iterator[tuple[str, int]]:
    """Yield region and number of samples of each run of the batch."""
    each = ((region, end - first) for pipeline in plan.pipelines for region, first, end in _read(pipeline, scenario))
    for region, runs in groupby(each, lambda run: run[0]):
        if samples := sum(count for _, count in runs):
            yield region, samples


def _read(pipeline: Pipeline, scenario: Scenario, stage: int = 0) -> Iterator[tuple[str, int, int]]:
    """Yield region, first and end sample (in the microbatch) of each part of a microbatch that a stage's device has."""
    devices = scenario.cluster.by_name
    for samples in pipeline.microbatches:
        replicas = pipeline.stages[stage].replicas
        for replica, (first, end) in zip(replicas, pipeline.stages[stage].intervals(samples), strict=True):
            if end > first:
                yield devices[replica.device].region, first, end


def foreign_samples(plan: Plan, scenario: Scenario) -> tuple[int, str, str] | None:
    """Return a pipeline whose last stage needs targets of another region's samples; None if there is none.

    Returns:
        Index of the pipeline, the region of the last stage, and that of the samples.
    """
    for index, pipeline in enumerate(plan.pipelines):
        first, last = (list(_by_sample(pipeline, scenario, stage)) for stage in (0, -1))
        for region, other in zip(last, first, strict=True):
            if region != other:
                return index, region, other
    return None


def _by_sample(pipeline: Pipeline, scenario: Scenario, stage: int) -> Iterator[str]:
    for region, first, end in _read(pipeline, scenario, stage):
        yield from [region] * (end - first)
