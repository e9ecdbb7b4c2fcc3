"""What orders hold at once, and whether that is within a problem's limits."""

import numpy as np

from planner.schedules.kernel.arrays import GRACE, Ints
from planner.schedules.kernel.problem import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Floats,
    Orders,
    SchedulingProblem,
)
from traces.common.errors import InputError


def peak_bytes(problem: SchedulingProblem, orders: Orders) -> Floats:
    """Return the most bytes of activations that each worker holds at once, [workers]."""
    activation_bytes = problem.activation_bytes[orders.stage, orders.microbatch]
    weight_bytes = problem.weight_bytes[orders.stage, orders.microbatch]
    change_bytes = np.where(orders.kind == FORWARD, activation_bytes, -activation_bytes)
    change_bytes = np.where(orders.kind == BACKWARD_INPUT, weight_bytes - activation_bytes, change_bytes)
    change_bytes = np.where(orders.kind == BACKWARD_WEIGHT, -weight_bytes, change_bytes)
    # What B recomputes comes and goes with it; of I it is among the weight's bytes.
    recomputed_bytes = problem.recomputed_bytes[orders.stage, orders.microbatch]
    within_bytes = np.where(orders.kind == BACKWARD, activation_bytes + recomputed_bytes, 0.0)
    rows = zip(*(np.split(each, orders.first_action[1:-1]) for each in (change_bytes, within_bytes)), strict=True)
    return np.array([(np.cumsum(change) + within).max(initial=0.0) for change, within in rows])


def peak_live(problem: SchedulingProblem, orders: Orders) -> Ints:
    """Return the most microbatches that each stage holds between the start of F and the end of I or B, [stages]."""
    change = np.where(orders.kind == FORWARD, 1, np.where(orders.kind == BACKWARD_WEIGHT, 0, -1))
    return np.array([np.cumsum(change[orders.stage == stage]).max() for stage in range(problem.stages)])


def is_within_limits(problem: SchedulingProblem, orders: Orders) -> bool:
    """Whether orders keep within every worker's memory and every stage's ``in_flight``."""
    fits = np.all(peak_bytes(problem, orders) <= problem.capacity_bytes * (1 + GRACE))
    return bool(fits and np.all(peak_live(problem, orders) <= np.array(problem.in_flight)))


def is_straight(workers: tuple[int, ...]) -> bool:
    """Whether every worker holds one stage."""
    return len(set(workers)) == len(workers)


def is_looped(workers: tuple[int, ...]) -> bool:
    """Whether stages go round the workers in turn, so that worker 0 of P holds stages 0, P, 2P, ..."""
    count = len(set(workers))
    return len(workers) % count == 0 and all(holder == workers[stage % count] for stage, holder in enumerate(workers))


def is_v_shaped(workers: tuple[int, ...]) -> bool:
    """Whether the worker of stage s holds stage 2P - 1 - s too, of 2P stages on P workers."""
    return len(workers) == 2 * len(set(workers)) and workers == workers[::-1]


def require_straight(problem: SchedulingProblem, name: str) -> None:
    """Refuse a pipeline whose workers hold several stages.

    Raises:
        InputError: A worker does, so schedule ``name`` says nothing about its order.
    """
    if not is_straight(problem.workers):
        raise InputError(
            f"{problem.stages} stages on {problem.worker_count} workers",
            where=f"schedule '{name}'",
            valid="it orders one stage a worker; take interleaved-1f1b, zb-v, compact-zb or portfolio",
        )
