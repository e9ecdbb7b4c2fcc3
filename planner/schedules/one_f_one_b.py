"""1F1B: after a warm-up, one forward, one backward in turn (PipeDream-Flush, Narayanan et al., 2021).

With P = 3 stages, M = 4 microbatches and depths 3, 2, 1::

    stage 0  F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    stage 1  .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    stage 2  .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

Makespan of equal stages without transfer time: (M + P - 1)(F + B), as GPipe, but stage s holds only its
``in_flight`` microbatches, P - s here. Over slow links a greater depth hides the round trip.
"""

from planner.actions import Action, Kind
from planner.plan import Pipeline


def one_f_one_b(pipeline: Pipeline, stage: int) -> tuple[Action, ...]:
    """Return one stage's actions in order."""
    count = len(pipeline.microbatches)
    depth = min(pipeline.stages[stage].in_flight, count)
    warm_up = [Action(stage, Kind.FORWARD, microbatch) for microbatch in range(depth)]
    steady = [
        action
        for microbatch in range(count - depth)
        for action in (
            Action(stage, Kind.BACKWARD, microbatch),
            Action(stage, Kind.FORWARD, microbatch + depth),
        )
    ]
    cool_down = [Action(stage, Kind.BACKWARD, microbatch) for microbatch in range(count - depth, count)]
    return (*warm_up, *steady, *cool_down)
