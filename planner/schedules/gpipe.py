"""GPipe: all forwards, then all backwards (Huang et al., 2019) [paper].

With P = 3 stages and M = 4 microbatches::

    stage 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    stage 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    stage 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

Makespan of equal stages without transfer time: (M + P - 1)(F + B). Every stage holds M microbatches at once, whatever
its ``in_flight`` and its worker's memory say. A worker with several stages takes them one after the other, from the
first for F and from the last for B (looped, breadth-first: Lamy-Poirier, 2023 [paper]).
"""

from planner.plan.actions import Action, Kind
from planner.schedules.kernel.problem import Orders, SchedulingProblem


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
