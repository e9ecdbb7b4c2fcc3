"""How pipelines bring their copies of a layer together, in words that fit each other."""

from planner.plan.plan import ALGORITHMS, METHODS, Plan
from traces.common.errors import InputError
from traces.common.names import find_by_name

WAITS = "allreduce"
# Methods that exchange in every step.
EVERY_STEP = (WAITS, "asgd")

_WHERE = "synchronisation"


def check_synchronisation(plan: Plan) -> None:
    """Refuse a way to synchronise that does not exist or that this plan cannot have.

    Raises:
        InputError: With the key and its value.
    """
    how = plan.synchronisation
    find_by_name(how.method, dict.fromkeys(METHODS), "method", where=f"{_WHERE}.method")
    find_by_name(how.algorithm, dict.fromkeys(ALGORITHMS), "algorithm", where=f"{_WHERE}.algorithm")
    if how.interval_steps < 1 or (how.interval_steps > 1 and how.method in EVERY_STEP):
        raise InputError(
            f"{how.interval_steps} steps between exchanges with method '{how.method}'",
            where=f"{_WHERE}.interval_steps",
            valid=f"1 for {' and '.join(EVERY_STEP)}, which exchange in every step; 1 or more for the others",
        )
    if how.method == WAITS and how.staleness_bound is not None:
        raise InputError(
            f"a staleness bound of {how.staleness_bound} with method '{WAITS}', in which nobody runs ahead",
            where=f"{_WHERE}.staleness_bound",
            valid="remove it, or choose a method that does not wait: asgd, asgd-ga or ma",
        )
    if how.staleness_bound is not None and how.staleness_bound < 0:
        raise InputError(
            f"a staleness bound of {how.staleness_bound}",
            where=f"{_WHERE}.staleness_bound",
            valid="a number of steps, 0 or more; leave it out for no bound",
        )
    if how.bucket_bytes:
        _check_overlap(plan)
    if how.method != WAITS and len(plan.pipelines) == 1:
        raise InputError(
            f"method '{how.method}' with a single pipeline, which has nobody to exchange with",
            where=f"{_WHERE}.method",
            valid=f"write '{WAITS}', or make a plan of several pipelines",
        )
    if plan.connections < 1:
        raise InputError(f"{plan.connections} connections", where="connections", valid="1 or more")


def _check_overlap(plan: Plan) -> None:
    how, where = plan.synchronisation, f"{_WHERE}.bucket_bytes"
    if how.bucket_bytes < 0:
        raise InputError(
            f"buckets of {how.bucket_bytes} bytes",
            where=where,
            valid="1 or more; 0 for sums that begin after the last action",
        )
    if how.method != WAITS:
        raise InputError(
            f"buckets of {how.bucket_bytes} bytes with method '{how.method}', whose exchanges nobody waits for",
            where=where,
            valid=f"remove it, or write method '{WAITS}'",
        )
    if plan.order == "dynamic":
        raise InputError(
            f"buckets of {how.bucket_bytes} bytes with order 'dynamic', in which nobody knows which action is the last",
            where=where,
            valid="remove it, or write order 'scheduled'",
        )
