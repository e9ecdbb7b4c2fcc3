"""The optimal order, found and proved by a constraint solver (OR-tools CP-SAT), to compare other schedules with.

Every F, I and W is an interval of its worker's time, every transfer one of its channel's. ``in_flight`` and memory are
respected. Equal microbatches keep their order, which loses nothing; B is left out, since I and W in its place are never
later. Proving takes tenths of a second for 4 stages and 8 microbatches, half a minute for 8 and 32.

Times become whole ticks. Where they have a common divisor (all are whole milliseconds, say) nothing is lost; otherwise
a tick is a millionth of the makespan of the initial orders, and times are rounded down: the bound stays proved.
Channels may carry transfers in any order here, which might be impossible where stages share a channel; the bound stays
valid. The makespan returned is always that of the orders, timed exactly.
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

# Relative distance at which a makespan counts as equal to its bound: the error of rounding to ticks.
_PROVED = 1e-4


@dataclass(frozen=True, slots=True)
class Solution:
    """Result of the solver within its time.

    Attributes:
        orders: Best orders found.
        makespan_s: Makespan of these orders, seconds.
        bound_s: Lower bound of the makespan of any orders, seconds.
    """

    orders: Orders
    makespan_s: float
    bound_s: float

    @property
    def gap_ratio(self) -> float:
        """Distance of the makespan from the bound, relative to the bound."""
        return self.makespan_s / self.bound_s - 1 if self.bound_s else 0.0

    @property
    def is_proved(self) -> bool:
        """Whether the bound is within 1e-4 of the makespan; False also if time ran out."""
        return self.gap_ratio <= _PROVED


def optimal(problem: SchedulingProblem) -> Orders:
    """Return the best orders found in `LIMIT_S` seconds.

    Raises:
        InputError: OR-tools is not installed, or a microbatch does not fit into a worker's memory.
    """
    return solve(problem).orders


def solve(problem: SchedulingProblem, limit_s: float = LIMIT_S, threads: int = 2) -> Solution:
    """Return the best orders that the solver finds in ``limit_s`` seconds, starting from compact zero bubble.

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
    search.parameters.num_workers = threads
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
        raise InputError("schedule 'optimal' needs OR-tools", valid="install 'ropebridge[solve]'") from None
    return cp_model


def _actions(orders: Orders) -> list[tuple[int, int, int]]:
    return list(zip(orders.kind.tolist(), orders.stage.tolist(), orders.microbatch.tolist(), strict=True))


def _by_start(problem: SchedulingProblem, starts: Mapping[tuple[int, int, int], int]) -> Orders:
    """Return the actions in the order of their starts; where these are equal, F before I before W."""
    rows: list[list[Action]] = [[] for _ in range(problem.worker_count)]
    for kind, stage, microbatch in sorted(starts, key=lambda action: (starts[action], *action)):
        rows[problem.workers[stage]].append(Action(stage, KINDS[kind], microbatch))
    return Orders.from_actions(rows)


def _better(problem: SchedulingProblem, start: Orders, found: Orders, bound_s: float) -> Solution:
    """Return the faster orders, timed exactly; those found may be slower where rounding hid a wait."""
    start_s = finish_s(problem, start)
    try:
        found_s = finish_s(problem, found)
    except InputError:
        return Solution(start, start_s, bound_s)
    if found_s < start_s and is_within_limits(problem, found):
        return Solution(found, found_s, bound_s)
    return Solution(start, start_s, bound_s)
