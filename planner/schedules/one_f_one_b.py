"""1F1B: after a warm-up, one forward, one backward in turn (PipeDream-Flush, Narayanan et al., 2021) [paper].

With P = 3 stages, M = 4 microbatches and depths 3, 2, 1::

    stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Makespan of equal stages without transfer time: (M + P - 1)(F + B), as GPipe, but stage s holds only its
``in_flight`` microbatches, P - s here. Over slow links a greater depth hides the round trip. A stage holds fewer where
memory ends, or where the stage before it holds fewer.
"""

from collections.abc import Iterator

from planner.plan.actions import Action, Kind
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.kernel.problem import Orders, SchedulingProblem, is_looped, is_within_limits, require_straight
from planner.schedules.steady_state import take_turns
from traces.common.errors import InputError


def gpipe(problem: SchedulingProblem) -> Orders:
    """Return every worker's forwards, then its backwards."""
    microbatches = range(problem.microbatches)
    return Orders.from_actions(
        [
            *(Action(stage, Kind.FORWARD, microbatch) for stage in held for microbatch in microbatches),
            *(Action(stage, Kind.BACKWARD, microbatch) for stage in reversed(held) for microbatch in microbatches),
        ]
        for held in map(problem.stages_of, range(problem.worker_count))
    )


def one_f_one_b(problem: SchedulingProblem) -> Orders:
    """Return every worker's forwards and backwards in turn.

    Raises:
        InputError: A worker holds several stages, or a microbatch does not fit into its memory.
    """
    require_straight(problem, "1f1b")
    return take_turns(problem, problem.in_flight)


def interleaved_one_f_one_b(problem: SchedulingProblem) -> Orders:
    """Return every worker's forwards and backwards in turn.

    Raises:
        InputError: Stages do not go round the workers, or a microbatch does not fit into a worker's memory.
    """
    if not is_looped(problem.workers):
        raise InputError(
            f"stages lie on workers {', '.join(map(str, problem.workers))}",
            where="schedule 'interleaved-1f1b'",
            valid="stages go round the workers in turn: 0, 1, 0, 1 for two workers with two stages each",
        )
    rows: dict[int, list[Action]] = {}
    for position in range(problem.worker_count):
        rows[problem.workers[position]] = _row(problem, position)
    orders = Orders.from_actions(rows[worker] for worker in range(problem.worker_count))
    return orders if is_within_limits(problem, orders) else dynamic_orders(problem, split=False)


def _row(problem: SchedulingProblem, position: int) -> list[Action]:
    count, held = problem.worker_count, problem.stages // problem.worker_count
    ahead = (held - 1) * count + 2 * (count - 1 - position)
    stages = [position + chunk * count for chunk in range(held)]
    forwards = list(_in_groups(problem, Kind.FORWARD, stages))
    backwards = list(_in_groups(problem, Kind.BACKWARD, stages[::-1]))
    ahead = min(ahead, len(forwards))
    turns = (action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair)
    row = [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]
    return [action for action in row if action.microbatch < problem.microbatches]


def _in_groups(problem: SchedulingProblem, kind: Kind, stages: list[int]) -> Iterator[Action]:
    """All actions of a kind, with microbatches up to a whole number of groups."""
    size = problem.worker_count
    for first in range(0, problem.microbatches, size):
        for stage in stages:
            yield from (Action(stage, kind, microbatch) for microbatch in range(first, first + size))
