"""The search for one pipeline over groups of devices: stages per group, layers per stage, and microbatches.

Each group is one stage of replicas, one stage per device, or something in between, independently of other groups, so
that stages may have different widths. Candidates are timed by a closed form at constant rates,

    R_0 + max( over stages of (M - 1) * max(C_s, R_s / K_s) + sync_s, over links of (M - 1) * X ),

which is the objective of `planner.systems.deepcee.layer_split` with the depths K_s that fit into memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planner.cost.in_flight import fitting_depths, latency_aware_depths, plain_depths
from planner.plan.microbatches import even_cut, even_groups
from planner.plan.plan import Pipeline, Stage
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.device_groups import Group, model_time_s
from planner.systems.deepcee.layer_split import (
    Depth,
    Replicas,
    SplitProblem,
    relative_shares,
    split_layers,
    split_problem,
)

# Limit on microbatches. With 64, an order is found in tenths of a second, and fill and drain hardly matter.
MOST_MICROBATCHES = 64

# Rounds of the search through all groups; one is nearly always enough.
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The choices made before the layers are split.

    Attributes:
        groups: Groups in the order of the pipeline.
        stages: Number of stages of each group.
        microbatches: Microbatches of one step.
    """

    groups: tuple[Group, ...]
    stages: tuple[int, ...]
    microbatches: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline of some shape, and the time of its step by the closed form, seconds."""

    shape: Shape
    pipeline: Pipeline
    step_s: float


class PipelineSearch:
    """Finds pipelines for a scenario.

    Args:
        scenario: Scenario that pipelines are for.
        hides_latency: Whether stages keep as many microbatches as hide the round trips, instead of P - s.
    """

    def __init__(self, scenario: Scenario, *, hides_latency: bool) -> None:
        self._scenario = scenario
        self._hides_latency = hides_latency
        self._known: dict[Shape, Candidate | None] = {}

    def starts(self, groups: tuple[Group, ...]) -> list[Candidate]:
        """Return the pipelines of some simple shapes: one stage per group, or one per device."""
        wide, narrow = (1,) * len(groups), tuple(len(group) for group in groups)
        shapes = (Shape(groups, each, count) for each in dict.fromkeys((wide, narrow)) for count in self._counts())
        return [found for shape in shapes if (found := self._candidate(shape)) is not None]

    def improved(self, start: Candidate) -> Candidate:
        """Return the fastest candidate found by varying one group's stages or the microbatches at a time."""
        best = start
        for _ in range(_ROUNDS):
            before = best
            for index, group in enumerate(best.shape.groups):
                best = self._best_of(best, (_with_stages(best.shape, index, each) for each in _divisors(len(group))))
            best = self._best_of(best, (replace(best.shape, microbatches=count) for count in self._counts()))
            if best is before:
                break
        return best

    def _best_of(self, best: Candidate, shapes: Iterator[Shape]) -> Candidate:
        tried = (self._candidate(shape) for shape in list(shapes))
        return min([best, *(each for each in tried if each is not None)], key=lambda each: each.step_s)

    def _counts(self) -> list[int]:
        batch = self._scenario.training.global_batch
        most = min(batch, MOST_MICROBATCHES)
        return [count for count in range(1, most + 1) if batch % count == 0 or count & (count - 1) == 0]

    def _candidate(self, shape: Shape) -> Candidate | None:
        if shape not in self._known:
            self._known[shape] = self._make(shape) if sum(shape.stages) <= len(self._scenario.model.layers) else None
        return self._known[shape]

    def _make(self, shape: Shape) -> Candidate | None:
        devices = [
            each
            for group, count in zip(shape.groups, shape.stages, strict=True)
            for each in _parts(group, count, self._scenario)
        ]
        microbatches = even_cut(self._scenario.training.global_batch, shape.microbatches)
        problem = split_problem(self._scenario, devices, microbatches)
        depths: tuple[Depth, ...] = ("hiding" if self._hides_latency else "plain", "one")
        splits = {split.bounds for depth in depths if (split := split_layers(problem, depth)) is not None}
        made = [self._with_depths(shape, problem, bounds, devices, microbatches) for bounds in sorted(splits)]
        return min((each for each in made if each is not None), key=lambda each: each.step_s, default=None)

    def _with_depths(
        self,
        shape: Shape,
        problem: SplitProblem,
        bounds: tuple[int, ...],
        devices: Sequence[Replicas],
        microbatches: tuple[int, ...],
    ) -> Candidate | None:
        ranges = list(enumerate(pairwise(bounds)))
        stages = [Stage(first, end, devices[index], 1) for index, (first, end) in ranges]
        compute_s = [float(problem.compute_s[index, first, end]) for index, (first, end) in ranges]
        sync_s = [float(problem.sync_s[index, first, end]) for index, (first, end) in ranges]
        transfer_s = [float(problem.transfer_s[index, end]) for index, (_, end) in ranges[:-1]]
        latency_s = problem.latency_s.tolist()
        wanted = plain_depths(len(stages))
        if self._hides_latency:
            wanted = latency_aware_depths(compute_s, transfer_s, latency_s)
        depths = fitting_depths(wanted, stages, self._scenario, microbatches)
        if depths is None:
            return None
        step_s = closed_form_s(compute_s, sync_s, transfer_s, latency_s, depths, len(microbatches))
        return Candidate(shape, Pipeline(tuple(stages), microbatches).with_depths(depths), step_s)


def closed_form_s(
    compute_s: Sequence[float],
    sync_s: Sequence[float],
    transfer_s: Sequence[float],
    latency_s: Sequence[float],
    depths: Sequence[int],
    microbatches: int,
) -> float:
    """Return the time of a pipeline's step at constant rates by the closed form, seconds.

    Args:
        compute_s: Time of one microbatch on each stage, forward and backward, seconds.
        sync_s: Time of each stage's gradient sum, seconds.
        transfer_s: Time for which one microbatch keeps each link busy, seconds.
        latency_s: One-way latency of each link, seconds.
        depths: Microbatches in flight at each stage.
        microbatches: Microbatches of one step.
    """
    transfers_s = 2 * (np.array([*transfer_s, 0.0]) + np.array([*latency_s, 0.0]))
    round_trip_s = np.cumsum((np.array(compute_s) + transfers_s)[::-1])[::-1]
    # With all microbatches in flight, no stage waits for a round trip to end.
    waiting_s = np.where(np.array(depths) < microbatches, round_trip_s / np.array(depths), 0.0)
    of_stages = (microbatches - 1) * np.maximum(compute_s, waiting_s) + np.array(sync_s)
    of_links = [(microbatches - 1) * each for each in transfer_s]
    return float(round_trip_s[0] + max(of_stages.max(), *of_links, 0.0))


def _parts(group: Sequence[Device], count: int, scenario: Scenario) -> Iterator[Replicas]:
    """Yield the replicas of each of ``count`` stages of a group, with shares in proportion to their speeds."""
    for devices in even_groups(group, count):
        yield relative_shares({device.name: model_time_s(device, scenario) for device in devices})


def _with_stages(shape: Shape, index: int, count: int) -> Shape:
    return replace(shape, stages=(*shape.stages[:index], count, *shape.stages[index + 1 :]))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
