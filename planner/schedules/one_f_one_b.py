"""1F1B: after a warm-up, one forward, one backward in turn (PipeDream-Flush, Narayanan et al., 2021) [paper].

With P = 3 stages, M = 4 microbatches and depths 3, 2, 1::

    stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Makespan of equal stages without transfer time: (M + P - 1)(F + B), as GPipe, but stage s holds only its
``in_flight`` microbatches, P - s here. Over slow links a greater depth hides the round trip. A stage holds fewer where
memory ends, or where the stage before it holds fewer.
"""

from planner.schedules.kernel.limits import require_straight
from planner.schedules.kernel.problem import Orders, SchedulingProblem
from planner.schedules.steady_state import take_turns


def one_f_one_b(problem: SchedulingProblem) -> Orders:
    """Return every worker's forwards and backwards in turn.

    Raises:
        InputError: A worker holds several stages, or a microbatch does not fit into its memory.
    """
    require_straight(problem, "1f1b")
    return take_turns(problem, problem.in_flight)
