"""The synchronisation of a plan: settings that exist and fit each other."""

from planner.plan.plan import ALGORITHMS, METHODS, Plan
from traces.common.errors import InputError, find_by_name

_ALLREDUCE = "allreduce"
# Methods that exchange in every step.
_EVERY_STEP = (_ALLREDUCE, "asgd")

_WHERE = "synchronisation"


def check_synchronisation(plan: Plan) -> None:
    """Refuse a synchronisation that does not exist or that this plan cannot have."""
    how = plan.synchronisation
    find_by_name(how.method, dict.fromkeys(METHODS), "method", where=f"{_WHERE}.method")
    find_by_name(how.algorithm, dict.fromkeys(ALGORITHMS), "algorithm", where=f"{_WHERE}.algorithm")
    if how.interval_steps < 1 or (how.interval_steps > 1 and how.method in _EVERY_STEP):
        raise InputError(
            f"{how.interval_steps} steps between exchanges are not allowed with method '{how.method}'",
            where=f"{_WHERE}.interval_steps",
            valid=f"give 1 for {' and '.join(_EVERY_STEP)}, which exchange in every step; 1 or more for the others",
        )
    if how.method == _ALLREDUCE and how.staleness_bound is not None:
        raise InputError(
            f"a staleness bound of {how.staleness_bound} does not fit method '{_ALLREDUCE}': nobody runs ahead",
            where=f"{_WHERE}.staleness_bound",
            valid="remove it, or choose a method that does not wait: asgd, asgd-ga or ma",
        )
    if how.staleness_bound is not None and how.staleness_bound < 0:
        raise InputError(
            f"a staleness bound of {how.staleness_bound} is not allowed",
            where=f"{_WHERE}.staleness_bound",
            valid="give a number of steps, 0 or more, or leave it out for no bound",
        )
    if how.bucket_bytes:
        _check_overlap(plan)
    if how.method != _ALLREDUCE and len(plan.pipelines) == 1:
        raise InputError(
            f"method '{how.method}' needs several pipelines: a single pipeline has no other to exchange with",
            where=f"{_WHERE}.method",
            valid=f"write '{_ALLREDUCE}', or make a plan of several pipelines",
        )
    if plan.connections < 1:
        raise InputError(f"{plan.connections} connections are not allowed", where="connections", valid="give 1 or more")


def _check_overlap(plan: Plan) -> None:
    how, where = plan.synchronisation, f"{_WHERE}.bucket_bytes"
    if how.bucket_bytes < 0:
        raise InputError(
            f"buckets of {how.bucket_bytes} bytes are not allowed",
            where=where,
            valid="give 1 or more, or 0 for sums that begin after the last action",
        )
    if how.method != _ALLREDUCE:
        raise InputError(
            f"buckets of {how.bucket_bytes} bytes do not fit method '{how.method}', whose exchanges nobody waits for",
            where=where,
            valid=f"remove it, or write method '{_ALLREDUCE}'",
        )
    if plan.order == "dynamic":
        raise InputError(
            f"buckets of {how.bucket_bytes} bytes do not fit order 'dynamic', in which no action is surely the last",
            where=where,
            valid="remove it, or write order 'scheduled'",
        )
