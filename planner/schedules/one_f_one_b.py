"""GPipe, 1F1B and interleaved 1F1B: schedules that run F (forward) and unsplit backwards, B, never split."""

from collections.abc import Iterator

from planner.plan.actions import Action, Kind
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.kernel.problem import Orders, SchedulingProblem, is_looped, is_within_limits, require_straight
from planner.schedules.steady_state import steady_state_orders
from traces.common.errors import InputError


def gpipe(problem: SchedulingProblem) -> Orders:
    """Return the orders of GPipe: first all forwards, after them all backwards (Huang et al., 2019) [paper].

    With P = 3 stages and M = 4 microbatches::

        stage 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
        stage 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
        stage 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

    The makespan of equal stages without transfer time is (M + P - 1)(F + B). Every stage holds M microbatches at once;
    ``in_flight`` and memory are ignored. A worker with several stages runs the F of one stage after the other, from its
    first stage to its last, and the B from its last stage to its first (looped, breadth-first: Lamy-Poirier, 2023
    [paper]).
    """
    microbatches = range(problem.microbatches)
    return Orders.from_actions(
        [
            *(Action(stage, Kind.FORWARD, microbatch) for stage in stages for microbatch in microbatches),
            *(Action(stage, Kind.BACKWARD, microbatch) for stage in reversed(stages) for microbatch in microbatches),
        ]
        for stages in map(problem.stages_of, range(problem.worker_count))
    )


def one_f_one_b(problem: SchedulingProblem) -> Orders:
    """Return the orders of 1F1B: after a warm-up of forwards, a backward and a forward in turn.

    The schedule is PipeDream-Flush (Narayanan et al., 2021) [paper]. With P = 3 stages, M = 4 microbatches and an
    ``in_flight`` of 3, 2 and 1::

        stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
        stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

    The makespan of equal stages without transfer time is that of GPipe, (M + P - 1)(F + B), but stage s holds only
    ``in_flight`` microbatches at once, here P - s. Over slow links, more microbatches in flight hide the round trip. A
    stage holds fewer than ``in_flight`` if its memory is too small, or if the preceding stage holds fewer.

    Raises:
        InputError: A worker holds several stages, or a microbatch does not fit into its memory.
    """
    require_straight(problem, "1f1b")
    return steady_state_orders(problem, problem.in_flight)


def interleaved_one_f_one_b(problem: SchedulingProblem) -> Orders:
    """Return the orders of interleaved 1F1B, whose workers hold several stages each to shorten the warm-up [paper].

    Worker w of P holds the V stages w, w + P, w + 2P, ... (Narayanan et al., 2021). With P = 2, V = 2 and M = 4
    microbatches::

        worker 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
        worker 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...

    Microbatches run in groups of P. A worker runs the forwards of a group on one stage after the other, from its first
    to its last, and the backwards from its last stage to its first. Worker w runs (V - 1)P + 2(P - 1 - w) forwards as
    its warm-up, after which one forward and one backward alternate. With F and B the times of one stage, equal for all
    stages, and no transfer time, the makespan is MV(F + B) + (P - 1)(F + B). At equal work per worker, the bubble is
    1/V of that of 1F1B, and the traffic is V times as large. If P divides M, the orders equal those of
    torch.distributed.pipelining; otherwise the last group is smaller. If these orders exceed ``in_flight`` or memory,
    the orders of `planner.schedules.dynamic.dynamic_orders`, which respect both, are returned instead.

    Raises:
        InputError: Stage s is not on the same worker as stage s - P, or a microbatch does not fit into memory.
    """
    if not is_looped(problem.workers):
        raise InputError(
            f"stages lie on workers {', '.join(map(str, problem.workers))}",
            where="schedule 'interleaved-1f1b'",
            valid="place stages on the workers in turn: 0, 1, 0, 1 for two workers with two stages each",
        )
    rows = {
        worker: _interleaved(problem, place) for place, worker in enumerate(problem.workers[: problem.worker_count])
    }
    orders = Orders.from_actions(rows[worker] for worker in range(problem.worker_count))
    return orders if is_within_limits(problem, orders) else dynamic_orders(problem, split=False)


def _interleaved(problem: SchedulingProblem, place: int) -> list[Action]:
    """Return the actions of the worker that holds stages ``place``, ``place`` + P, ``place`` + 2P, ..."""
    count, chunks = problem.worker_count, problem.stages // problem.worker_count
    stages = range(place, problem.stages, count)
    forwards = list(_in_groups(problem, Kind.FORWARD, stages))
    backwards = list(_in_groups(problem, Kind.BACKWARD, stages[::-1]))
    warm_up = min((chunks - 1) * count + 2 * (count - 1 - place), len(forwards))
    turns = (action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair)
    row = [*forwards[:warm_up], *turns, *backwards[len(forwards) - warm_up :]]
    return [action for action in row if action.microbatch < problem.microbatches]


def _in_groups(problem: SchedulingProblem, kind: Kind, stages: range) -> Iterator[Action]:
    """Yield all actions of a kind, group by group; the last group is filled up with microbatches that do not exist."""
    size = problem.worker_count
    for first in range(0, problem.microbatches, size):
        for stage in stages:
            yield from (Action(stage, kind, microbatch) for microbatch in range(first, first + size))
