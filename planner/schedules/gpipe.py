"""GPipe: all forwards, then all backwards (Huang et al., 2019).

With P = 3 stages and M = 4 microbatches::

    stage 0  F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    stage 1  .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    stage 2  .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

Makespan of equal stages without transfer time: (M + P - 1)(F + B). Every stage holds M microbatches at once.
"""

from planner.actions import Action, Kind
from planner.plan import Pipeline


def gpipe(pipeline: Pipeline, stage: int) -> tuple[Action, ...]:
    """Return one stage's actions in order."""
    count = len(pipeline.microbatches)
    forwards = (Action(stage, Kind.FORWARD, microbatch) for microbatch in range(count))
    backwards = (Action(stage, Kind.BACKWARD, microbatch) for microbatch in range(count))
    return (*forwards, *backwards)
