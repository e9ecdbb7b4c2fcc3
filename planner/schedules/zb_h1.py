"""ZB-H1: backward split into I and W, within the memory of 1F1B (Qi et al., Zero Bubble, 2023) [paper].

With P = 3 stages and M = 4 microbatches::

    stage 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    stage 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    stage 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Stage s runs P - s microbatches ahead and does W s microbatches later, so that every stage holds P at most, between
the start of F and the end of W. Makespan of M >= P microbatches on equal stages without transfer time:
M(F + I + W) + (P - 1)(F + I - min(F, I, W)), a third of the bubble of 1F1B where F = I = W. A stage runs less far ahead
where its ``in_flight`` or its memory says so.
"""

from planner.schedules.kernel.orders import Orders
from planner.schedules.kernel.placement import require_straight
from planner.schedules.kernel.problem import SchedulingProblem
from planner.schedules.steady_state import take_turns


def zb_h1(problem: SchedulingProblem) -> Orders:
    """Return every worker's F, I and W.

    Raises:
        InputError: A worker holds several stages, or a microbatch does not fit into its memory.
    """
    require_straight(problem, "zb-h1")
    depths = [min(problem.stages - stage, limit) for stage, limit in enumerate(problem.in_flight)]
    return take_turns(problem, depths, range(problem.stages))
