"""What orders hold at once, and whether that is within a problem's limits."""

import numpy as np

from planner.schedules.kernel.orders import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Orders
from planner.schedules.kernel.problem import Floats, SchedulingProblem
from planner.schedules.kernel.tables import GRACE, Ints


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
