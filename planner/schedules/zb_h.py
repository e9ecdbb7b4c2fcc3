"""ZB-H2: no bubble, for about twice the memory of 1F1B (Qi et al., Zero Bubble, 2023) [paper].

With P = 3 stages and M = 6 microbatches::

    stage 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .. ..
    stage 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ..
    stage 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

Stage s runs 2P - 2s - 1 microbatches ahead and does W 2s microbatches later, so that every stage holds 2P - 1 at most,
between the start of F and the end of W. With F = I = W, no transfer time and M >= 2P - 1 no stage idles between its
first and its last action: the makespan is (P - 1)F + M(F + I + W). A stage runs less far ahead where its ``in_flight``
or its memory says so.
"""

from planner.schedules.kernel.limits import require_straight
from planner.schedules.kernel.problem import Orders, SchedulingProblem
from planner.schedules.steady_state import take_turns


def zb_h1(problem: SchedulingProblem) -> Orders:
    """Return every worker's F, I and W.

    Raises:
        InputError: A worker holds several stages, or a microbatch does not fit into its memory.
    """
    require_straight(problem, "zb-h1")
    depths = [min(problem.stages - stage, limit) for stage, limit in enumerate(problem.in_flight)]
    return take_turns(problem, depths, range(problem.stages))


def zb_h2(problem: SchedulingProblem) -> Orders:
    """Return every worker's F, I and W.

    Raises:
        InputError: A worker holds several stages, or a microbatch does not fit into its memory.
    """
    require_straight(problem, "zb-h2")
    stages = range(problem.stages)
    depths = [min(2 * (problem.stages - stage) - 1, problem.in_flight[stage]) for stage in stages]
    return take_turns(problem, depths, [2 * stage for stage in stages])
