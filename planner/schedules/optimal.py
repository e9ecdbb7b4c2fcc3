"""The optimal order, found and proved by a constraint solver (OR-tools CP-SAT), as a reference for other schedules.

Every F (forward), I (input gradient) and W (weight gradient) is an interval on its worker, and every transfer is an
interval on its channel; intervals on one worker or channel do not overlap. ``in_flight`` and memory are constraints.
Equal microbatches keep their order, and every backward is split; neither excludes the optimum, since I and W in place
of a B never end later. A proof takes tenths of a second for 4 stages and 8 microbatches, and half a minute for 8 stages
and 32 microbatches.

The solver works in whole ticks of time. If all times have a common divisor (1 ms if all are whole milliseconds), the
tick is this divisor, and times are exact. Otherwise a tick is a millionth of the initial orders' makespan, and times
are rounded down. In the solver, channels may carry transfers in any order, although real channels are first come, first
served. Neither of these makes the solver's lower bound invalid. The reported makespan is computed at exact times.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.plan.actions import Action
from planner.schedules.compact_zb import compact_zb
from planner.schedules.kernel.annealing import split_backwards
from planner.schedules.kernel.bounds import lower_bound_s
from planner.schedules.kernel.cp_sat import ScheduleModel, tick_s
from planner.schedules.kernel.problem import KINDS, Orders, SchedulingProblem, is_within_limits
from planner.schedules.kernel.timing import finish_s, start_times_s
from traces.common.errors import InputError

LIMIT_S = 60.0

# Largest relative distance from its lower bound at which a makespan counts as optimal; it allows for rounding to ticks.
_PROVED = 1e-4


@dataclass(frozen=True, slots=True)
class Solution:
    """The orders that the solver found within its time limit, and a lower bound, ``bound_s``, on any makespan."""

    orders: Orders
    makespan_s: float
    bound_s: float

    @property
    def gap_ratio(self) -> float:
        """Difference of makespan and bound, divided by the bound; 0 if the bound is 0."""
        return self.makespan_s / self.bound_s - 1 if self.bound_s else 0.0

    @property
    def is_proved(self) -> bool:
        """Whether `gap_ratio` is at most 1e-4; False if time ran out before the proof."""
        return self.gap_ratio <= _PROVED


def optimal(problem: SchedulingProblem) -> Orders:
    """Return the orders with the least makespan that the solver finds in `LIMIT_S` seconds.

    Raises:
        InputError: OR-tools is not installed, or a microbatch does not fit into a worker's memory.
    """
    return solve(problem).orders


def solve(problem: SchedulingProblem, limit_s: float = LIMIT_S) -> Solution:
    """Return the orders with the least makespan that the solver finds in ``limit_s`` seconds, with two threads.

    The search starts from the orders of ``compact-zb``.

    Raises:
        InputError: OR-tools is not installed, or a microbatch does not fit into a worker's memory.
    """
    solver = _import_solver()
    start = split_backwards(compact_zb(problem))
    start_s, bound_s = finish_s(problem, start), lower_bound_s(problem)
    if start_s <= bound_s * (1 + _PROVED):
        return Solution(start, start_s, bound_s)
    tick = tick_s(problem, start_s)
    schedule = ScheduleModel(solver, problem, tick, round(start_s / tick), int(bound_s / tick * (1 - _PROVED)))
    for action, when_s in zip(_actions(start), start_times_s(problem, start), strict=True):
        schedule.model.add_hint(schedule.start[action], round(when_s / tick))
    search = solver.CpSolver()
    search.parameters.max_time_in_seconds = limit_s
    search.parameters.num_workers = 2
    status = search.solve(schedule.model)
    bound_s = max(bound_s, search.best_objective_bound * tick)
    found = start
    if status in (solver.OPTIMAL, solver.FEASIBLE):
        found = _by_start(problem, {action: search.value(when) for action, when in schedule.start.items()})
    return _better(problem, start, found, bound_s)


def _import_solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise InputError("schedule 'optimal' needs OR-tools", valid="install 'ropebridge[solve]' with pip") from None
    return cp_model


def _actions(orders: Orders) -> list[tuple[int, int, int]]:
    return list(zip(orders.kind.tolist(), orders.stage.tolist(), orders.microbatch.tolist(), strict=True))


def _by_start(problem: SchedulingProblem, starts: Mapping[tuple[int, int, int], int]) -> Orders:
    """Return orders sorted by the actions' start ticks; of actions that start together, F comes first and W last."""
    rows: list[list[Action]] = [[] for _ in range(problem.worker_count)]
    for kind, stage, microbatch in sorted(starts, key=lambda action: (starts[action], *action)):
        rows[problem.workers[stage]].append(Action(stage, KINDS[kind], microbatch))
    return Orders.from_actions(rows)


def _better(problem: SchedulingProblem, start: Orders, found: Orders, bound_s: float) -> Solution:
    """Return the orders with the shorter exact makespan; rounding to ticks may make ``found`` slower than ``start``."""
    start_s = finish_s(problem, start)
    try:
        found_s = finish_s(problem, found)
    except InputError:
        return Solution(start, start_s, bound_s)
    if found_s < start_s and is_within_limits(problem, found):
        return Solution(found, found_s, bound_s)
    return Solution(start, start_s, bound_s)
