"""A scheduling problem as constraints for OR-tools CP-SAT, with times in whole ticks and memory in whole grains."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.schedules.kernel.arrays import DOWN, UP, Tables, tables_of
from planner.schedules.kernel.problem import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, GRACE, Floats, SchedulingProblem

Key = tuple[int, int, int]
"""Kind, stage and microbatch of an action; kinds are numbered as in `planner.schedules.kernel.problem`."""

KINDS = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

# Candidates for a common divisor of values: the smallest value divided by 1, 2, ... `_MOST_PARTS`.
_MOST_PARTS = 1000
# Largest distance from a whole number at which a ratio counts as whole.
_REMAINDER = 1e-6
# Without a common divisor, a tick is ``longest_s`` divided by this.
_PARTS = 1_000_000


def tick_s(problem: SchedulingProblem, longest_s: float) -> float:
    """Return a common divisor of all times of the problem, or ``longest_s`` / 1e6 if there is none, seconds."""
    tables = tables_of(problem)
    times_s = [np.ravel(each) for each in (tables.duration_s, tables.transmission_s, tables.latency_s)]
    return _common_divisor(np.concatenate(times_s), longest_s)


def _common_divisor(values: Floats, whole: float) -> float:
    """Return a common divisor of all positive values, or ``whole`` / 1e6 if there is none."""
    values = np.unique(values[values > 0])
    for parts in range(1, _MOST_PARTS + 1):
        multiples = values / values[0] * parts
        if np.all(np.abs(multiples - np.rint(multiples)) <= _REMAINDER):
            return float(values[0] / parts)
    return whole / _PARTS


class ScheduleModel:
    """A CP-SAT model that minimizes the makespan; its variables are the start ticks of all actions.

    Args:
        solver: Module ``ortools.sat.python.cp_model``.
        problem: The pipeline to put in order.
        tick: Length of a tick in seconds; times are rounded down to ticks.
        longest: Upper bound on the makespan in ticks.
        bound: Lower bound on the makespan in ticks.
    """

    def __init__(self, solver: Any, problem: SchedulingProblem, tick: float, longest: int, bound: int) -> None:
        self.model = solver.CpModel()
        self.problem = problem
        self.tables: Tables = tables_of(problem)
        self.duration = _whole(self.tables.duration_s, tick)
        self.transmission = _whole(self.tables.transmission_s, tick)
        self.latency = _whole(self.tables.latency_s, tick)
        self.longest = longest
        self.start: dict[Key, Any] = {}
        self._constrain_actions()
        self._constrain_transfers()
        self._constrain_memory()
        makespan = self.model.new_int_var(bound, longest, "")
        for stage, microbatch in self._each():
            self.model.add(makespan >= self._end(BACKWARD_WEIGHT, stage, microbatch))
        self.model.minimize(makespan)

    def _each(self) -> Iterator[tuple[int, int]]:
        return product(range(self.problem.stages), range(self.problem.microbatches))

    def _variable(self) -> Any:
        return self.model.new_int_var(0, self.longest, "")

    def _end(self, kind: int, stage: int, microbatch: int) -> Any:
        return self.start[kind, stage, microbatch] + int(self.duration[kind, stage, microbatch])

    def _constrain_actions(self) -> None:
        """Constrain workers to one action at a time, and every microbatch to the order F, I, W."""
        intervals = defaultdict(list)
        for kind, (stage, microbatch) in product(KINDS, self._each()):
            start, size = self._variable(), int(self.duration[kind, stage, microbatch])
            self.start[kind, stage, microbatch] = start
            intervals[self.problem.workers[stage]].append(self.model.new_fixed_size_interval_var(start, size, ""))
            if microbatch and self.tables.equal_microbatches:
                self.model.add(start >= self._end(kind, stage, microbatch - 1))
        for own in intervals.values():
            self.model.add_no_overlap(own)
        for (earlier, later), (stage, microbatch) in product(pairwise(KINDS), self._each()):
            self.model.add(self.start[later, stage, microbatch] >= self._end(earlier, stage, microbatch))

    def _constrain_transfers(self) -> None:
        """Constrain actions to wait for their transfers, and channels to one transfer at a time."""
        intervals = defaultdict(list)
        for boundary, microbatch in product(range(self.problem.stages - 1), range(self.problem.microbatches)):
            for direction, kind, source, target in (
                (DOWN, FORWARD, boundary, boundary + 1),
                (UP, BACKWARD_INPUT, boundary + 1, boundary),
            ):
                made, needed = self._end(kind, source, microbatch), self.start[kind, target, microbatch]
                channel = int(self.tables.channel[direction, source])
                if channel < 0:
                    self.model.add(needed >= made)
                    continue
                busy = int(self.transmission[direction, source, microbatch])
                if busy:
                    begin = self._variable()
                    self.model.add(begin >= made)
                    intervals[channel].append(self.model.new_fixed_size_interval_var(begin, busy, ""))
                    made = begin + busy
                self.model.add(needed >= made + int(self.latency[direction, source]))
        for own in intervals.values():
            self.model.add_no_overlap(own)

    def _constrain_memory(self) -> None:
        """Constrain activations to every worker's memory, and the microbatches of a stage to its ``in_flight``."""
        for worker in range(self.problem.worker_count):
            stages = self.problem.stages_of(worker)
            capacity_bytes = float(self.problem.capacity_bytes[worker]) * (1 + GRACE)
            sizes = [self.problem.activation_bytes[list(stages)], self.problem.weight_bytes[list(stages)]]
            if np.sum(np.maximum(*sizes)) > capacity_bytes:
                grain_bytes = _common_divisor(np.concatenate(sizes).ravel(), capacity_bytes)
                held = [item for stage in stages for item in self._held(stage, grain_bytes)]
                self._limit(held, int(capacity_bytes / grain_bytes))
            for stage in stages:
                if self.problem.in_flight[stage] < self.problem.microbatches:
                    self._limit(self._live(stage), self.problem.in_flight[stage])

    def _span(self, first: int, last: int, stage: int, microbatch: int) -> tuple[Any, Any]:
        return self.start[first, stage, microbatch], self._end(last, stage, microbatch)

    def _live(self, stage: int) -> list[tuple[Any, Any, int]]:
        microbatches = range(self.problem.microbatches)
        return [(*self._span(FORWARD, BACKWARD_INPUT, stage, microbatch), 1) for microbatch in microbatches]

    def _held(self, stage: int, grain_bytes: float) -> list[tuple[Any, Any, int]]:
        """Return (start tick, end tick, grains) of all activations that a stage holds."""
        held = []
        for microbatch in range(self.problem.microbatches):
            activation = int(np.ceil(self.problem.activation_bytes[stage, microbatch] / grain_bytes - _REMAINDER))
            weight = int(np.ceil(self.problem.weight_bytes[stage, microbatch] / grain_bytes - _REMAINDER))
            begin, end = self._span(FORWARD, BACKWARD_INPUT, stage, microbatch)
            weighed = self._end(BACKWARD_WEIGHT, stage, microbatch)
            if weight == activation:
                held.append((begin, weighed, activation))
                continue
            # Recomputed activations are held from the start of I on.
            change = end if weight < activation else self.start[BACKWARD_INPUT, stage, microbatch]
            held.extend([(begin, change, activation), (change, weighed, weight)])
        return held

    def _limit(self, held: list[tuple[Any, Any, int]], capacity: int) -> None:
        sizes = [size for _, _, size in held]
        if self.tables.equal_microbatches and len(held) == self.problem.microbatches:
            # Equal microbatches begin and end in order: microbatch n + room begins only after microbatch n has ended.
            room = capacity // sizes[0] if sizes[0] else len(held)
            for (_, end, _), (begin, _, _) in zip(held, held[room:], strict=False):
                self.model.add(begin >= end)
            return
        intervals = [self.model.new_interval_var(begin, self._variable(), end, "") for begin, end, _ in held]
        self.model.add_cumulative(intervals, sizes, capacity)


def _whole(times_s: Floats, tick: float) -> NDArray[np.int64]:
    return np.floor(times_s / tick + _REMAINDER).astype(np.int64)
