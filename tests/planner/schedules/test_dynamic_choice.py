"""A worker that chooses one action at a time, against the orders that the planner foresees for it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan.actions import Action, Kind
from planner.schedules.dynamic import DynamicChoice, dynamic_orders
from planner.schedules.kernel.problem import SchedulingProblem


def alone(stages: int, microbatches: int, depth: int, kept: float, staying: float, room: float) -> SchedulingProblem:
    """All stages on one worker: nothing is sent, and what is ready depends on nothing but the worker itself."""
    seconds, crossing = np.ones((stages, microbatches)), np.zeros((stages - 1, microbatches))
    latency_s = np.zeros(stages - 1)
    least = stages * kept + max(0.0, staying - kept)
    return SchedulingProblem(
        (0,) * stages,
        (depth,) * stages,
        seconds,
        seconds,
        seconds,
        crossing,
        crossing,
        latency_s,
        latency_s,
        np.full((stages, microbatches), kept),
        np.full((stages, microbatches), staying),
        np.array([least + room]),
    )


@settings(max_examples=150)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sampled_from([0.0, 1.0, 2.0, 5.0]),
    st.integers(0, 12),
    st.booleans(),
)
def test_choice_by_choice_it_comes_to_the_same_orders(
    stages: int, microbatches: int, depth: int, kept: float, staying: float, room: int, split: bool
) -> None:
    problem = alone(stages, microbatches, depth, kept, staying, float(room))
    backwards = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split else (Kind.BACKWARD,)
    each = [(stage, microbatch) for stage in range(stages) for microbatch in range(microbatches)]
    kinds = (Kind.FORWARD, *backwards)
    choice = DynamicChoice(problem, 0, {Action(stage, kind, number): 0 for stage, number in each for kind in kinds})
    done = []
    while choice.remaining:
        action = choice.best()
        assert action is not None
        choice.start(action)
        choice.finish(action)
        done.append(action)
    assert tuple(done) == dynamic_orders(problem, split).actions(0)
