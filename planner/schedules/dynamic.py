"""No order at all: a free worker takes the best action that is ready, which absorbs jitter.

The rule: I or B before F; F only while the stage has fewer than ``in_flight`` microbatches between the start of F and
the end of I or B, and memory holds it, with room kept for a microbatch of every later stage of its worker and for what
a backward recomputes; W only when neither is ready at this moment, or before an I that recomputes more than fits. Of
several, that of the lowest microbatch, then that of the later stage. What arrives at the very moment at which a worker
becomes free is ready; what is still under way to it is not looked at.

The orders given here are those that the rule comes to where every action and transfer takes what the problem says.
"""

import numpy as np

from planner.schedules.kernel.list_scheduling import Rules, list_schedule
from planner.schedules.kernel.orders import Orders
from planner.schedules.kernel.problem import SchedulingProblem
from planner.schedules.kernel.sequences import first_actions, to_orders
from planner.schedules.kernel.tables import tables_of
from traces.common.errors import InputError


def dynamic_orders(problem: SchedulingProblem, split: bool) -> Orders:
    """Return the orders that workers fall into by the rule.

    Args:
        problem: The pipeline.
        split: Whether backwards are I and W; B otherwise.

    Raises:
        InputError: A microbatch does not fit into a worker's memory.
    """
    stages, microbatches = problem.stages, problem.microbatches
    nothing = np.zeros(stages)
    rules = Rules(
        split,
        np.arange(microbatches),
        np.maximum(1, np.array(problem.in_flight, dtype=np.int64)),
        np.ones(stages, dtype=np.bool_),
        nothing,
        nothing,
        np.full(stages, microbatches + 1),
    )
    first = first_actions(problem, split)
    sequence = np.empty(int(first[-1]), dtype=np.int64)
    if list_schedule(tables_of(problem), rules, first, np.inf, sequence) == np.inf:
        raise no_room(problem)
    return to_orders(sequence, first)


def no_room(problem: SchedulingProblem) -> InputError:
    """Return the error that some worker cannot hold a microbatch of each of its stages."""
    kept_bytes = np.bincount(problem.workers, problem.activation_bytes.max(axis=1), problem.worker_count)
    needs_bytes = kept_bytes + problem.reserve_bytes
    worker = int(np.argmax(needs_bytes / np.maximum(problem.capacity_bytes, 1e-300)))
    return InputError(
        f"worker {worker} has room for {problem.capacity_bytes[worker]:.0f} bytes of activations",
        valid=f"one microbatch of each of its stages takes {needs_bytes[worker]:.0f}: take smaller microbatches",
    )
