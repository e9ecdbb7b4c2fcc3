"""DeepCEE's search for one pipeline over given groups of devices: stages of each group, layers, and microbatches.

A group is divided into stages of equally many devices, from one stage with all devices as replicas to one stage per
device. Different groups may be divided differently. Candidates are compared by the time of a step at constant rates::

    R_0 + max( over stages s of (M - 1) * max(C_s, R_s / K_s) + sync_s, over links of (M - 1) * X )

The symbols are those of `planner.systems.deepcee.layer_split`, whose objective this is, except that K_s, the number of
microbatches in flight at stage s, is what fits into memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np

from planner.cost.in_flight import fitting_depths, latency_aware_depths, plain_depths
from planner.plan.microbatches import even_cut, even_groups
from planner.plan.plan import Pipeline, Replica, Stage
from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.device_groups import Group, model_time_s
from planner.systems.deepcee.layer_split import Depth, Replicas, SplitProblem, split_layers, split_points, split_problem

# Most microbatches of a step. With 64, the fill and drain of the pipeline hardly matter, and ordering actions is quick.
MOST_MICROBATCHES = 64

# Most passes over all groups and microbatch counts in `PipelineSearch.improved`; one is nearly always enough.
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The choices that the search makes before the layers are split.

    Attributes:
        groups: Groups of devices in the order of the pipeline.
        stages: Number of stages of each group.
        microbatches: Number of microbatches of one step.
    """

    groups: tuple[Group, ...]
    stages: tuple[int, ...]
    microbatches: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline, the choices that led to it, and the time of its step by the module's formula in seconds."""

    shape: Shape
    pipeline: Pipeline
    step_s: float


class PipelineSearch:
    """Finds pipelines for a scenario, and remembers the result of every shape.

    Args:
        scenario: Scenario that pipelines are for.
        hides_latency: Whether depths hide the round trips; otherwise they are 1F1B's.
    """

    def __init__(self, scenario: Scenario, *, hides_latency: bool) -> None:
        self._scenario = scenario
        self._hides_latency = hides_latency
        self._candidate = cache(self._make)

    @property
    def candidates(self) -> int:
        """Number of shapes that were turned into a pipeline, or found not to fit into memory."""
        return self._candidate.cache_info().misses

    def starts(self, groups: tuple[Group, ...]) -> list[Candidate]:
        """Return pipelines with one stage per group and with one stage per device, for every microbatch count."""
        wide, narrow = (1,) * len(groups), tuple(len(group) for group in groups)
        shapes = (Shape(groups, each, count) for each in dict.fromkeys((wide, narrow)) for count in self._counts())
        return [found for shape in shapes if (found := self._candidate(shape)) is not None]

    def improved(self, start: Candidate) -> Candidate:
        """Return the fastest candidate found by changing one number at a time: a group's stages, or microbatches."""
        best = start
        for _ in range(_ROUNDS):
            before = best
            for index, group in enumerate(best.shape.groups):
                counts = [count for count in range(1, len(group) + 1) if len(group) % count == 0]
                stages = best.shape.stages
                divided = [(*stages[:index], count, *stages[index + 1 :]) for count in counts]
                best = self._best_of(best, [replace(best.shape, stages=each) for each in divided])
            best = self._best_of(best, [replace(best.shape, microbatches=count) for count in self._counts()])
            if best is before:
                break
        return best

    def _best_of(self, best: Candidate, shapes: Sequence[Shape]) -> Candidate:
        tried = (self._candidate(shape) for shape in shapes)
        return min([best, *(each for each in tried if each is not None)], key=lambda each: each.step_s)

    def _counts(self) -> list[int]:
        batch = self._scenario.training.global_batch
        most = min(batch, MOST_MICROBATCHES)
        return [count for count in range(1, most + 1) if batch % count == 0 or count & (count - 1) == 0]

    def _make(self, shape: Shape) -> Candidate | None:
        if sum(shape.stages) >= len(split_points(self._scenario)):
            return None
        devices = [
            self._replicas(part)
            for group, count in zip(shape.groups, shape.stages, strict=True)
            for part in even_groups(group, count)
        ]
        microbatches = even_cut(self._scenario.training.global_batch, shape.microbatches)
        problem = split_problem(self._scenario, devices, microbatches)
        depths: tuple[Depth, ...] = ("hiding" if self._hides_latency else "plain", "one")
        splits = {split for depth in depths if (split := split_layers(problem, depth)) is not None}
        made = [self._with_depths(shape, problem, bounds, devices, microbatches) for bounds in sorted(splits)]
        return min((each for each in made if each is not None), key=lambda each: each.step_s, default=None)

    def _replicas(self, devices: Sequence[Device]) -> Replicas:
        """Return the devices as replicas of a stage, with shares in proportion to their speeds, at most 1."""
        times_s = [model_time_s(device, self._scenario) for device in devices]
        least_s = min(times_s)
        return tuple(
            Replica(device.name, least_s / time_s if time_s else 1.0)
            for device, time_s in zip(devices, times_s, strict=True)
        )

    def _with_depths(
        self,
        shape: Shape,
        problem: SplitProblem,
        bounds: tuple[int, ...],
        devices: Sequence[Replicas],
        microbatches: tuple[int, ...],
    ) -> Candidate | None:
        first, end, index = list(bounds[:-1]), list(bounds[1:]), np.arange(len(devices))
        layers = pairwise(split_points(self._scenario)[[*bounds]].tolist())
        stages = [Stage(*each, replicas, 1) for each, replicas in zip(layers, devices, strict=True)]
        compute_s, transfer_s = problem.compute_s[index, first, end], problem.transfer_s[index[:-1], end[:-1]]
        wanted = plain_depths(len(stages))
        if self._hides_latency:
            wanted = latency_aware_depths(compute_s.tolist(), transfer_s.tolist(), problem.latency_s.tolist())
        depths = fitting_depths(wanted, stages, self._scenario, microbatches)
        if depths is None:
            return None
        repeats = len(microbatches) - 1
        round_trips_s = compute_s + 2 * np.append(transfer_s + problem.latency_s, 0.0)
        round_trips_s = np.cumsum(round_trips_s[::-1])[::-1]
        # A stage with all microbatches in flight does not wait for a round trip to end.
        waiting_s = np.where(np.array(depths) <= repeats, round_trips_s / np.array(depths), 0.0)
        stages_s = repeats * np.maximum(compute_s, waiting_s) + problem.sync_s[index, first, end]
        step_s = float(round_trips_s[0] + max(stages_s.max(), *(repeats * transfer_s), 0.0))
        return Candidate(shape, Pipeline(tuple(stages), microbatches).with_depths(depths), step_s)
