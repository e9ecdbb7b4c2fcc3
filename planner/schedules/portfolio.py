"""Portfolio: whichever schedule is best for this placement, these times and this memory, by timing them all.

Schedules that do not split the backward win where they are as good: a split costs what the problem does not know of
(a second pass through the graph, or a store of inputs and output gradients).
"""

from planner.schedules.compact_zb import compact, published
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.gpipe import gpipe
from planner.schedules.kernel.limits import is_within_limits
from planner.schedules.kernel.orders import BACKWARD_WEIGHT, Orders
from planner.schedules.kernel.problem import SchedulingProblem
from planner.schedules.kernel.timing import finish_s

# Makespans this close, relative, are the same.
_SAME = 1e-9


def portfolio(problem: SchedulingProblem) -> Orders:
    """Return the best orders of all schedules but `planner.schedules.optimal`.

    Raises:
        InputError: A microbatch does not fit into a worker's memory.
    """
    dynamic = [dynamic_orders(problem, split) for split in (False, True)]
    starts = [orders for orders in (*dynamic, *published(problem), gpipe(problem)) if is_within_limits(problem, orders)]
    best = compact(problem, starts)
    best_s = finish_s(problem, best)
    whole = (orders for orders in starts if not (orders.kind == BACKWARD_WEIGHT).any())
    return next((orders for orders in whole if finish_s(problem, orders) <= best_s * (1 + _SAME)), best)
