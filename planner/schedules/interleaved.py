"""Interleaved 1F1B: every worker holds several stages, which shortens the warm-up (Narayanan et al., 2021) [paper].

Stages go round the workers in turn: worker w of P holds stages w, w + P, w + 2P, ... (V of them). With P = 2, V = 2
and M = 4 microbatches (stages 0 and 2 on worker 0, 1 and 3 on worker 1)::

    worker 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
    worker 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...

Microbatches go in groups of P: each worker does a group's forwards on its first stage, then on its second, and so on;
backwards from its last stage to its first. Worker w begins (V - 1)P + 2(P - 1 - w) forwards before its first backward,
then takes turns. Makespan of equal stages (a stage's F and B being 1/V of a worker's) without transfer time:
MV(F + B) + (P - 1)(F + B), so V times less bubble than 1F1B for V times the traffic. These are torch's orders where P
divides M; otherwise microbatches that are not there are left out of the last group. Where a stage's ``in_flight`` or
a worker's memory holds less, workers take what is ready within these limits instead, B first.
"""

from collections.abc import Iterator

from planner.plan.actions import Action, Kind
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.kernel.limits import is_looped, is_within_limits
from planner.schedules.kernel.problem import Orders, SchedulingProblem
from traces.common.errors import InputError


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
