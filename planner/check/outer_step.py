"""Checks of the outer step of DiLoCo."""

from planner.plan.outer_step import OUTER_COMPRESSIONS, PATTERNS, OuterStep
from planner.plan.plan import OUTER_METHODS, Plan
from traces.common.errors import InputError, find_by_name

_WHERE = "synchronisation.outer"

# The settings with other values than these need the method that streams.
_STREAMING = ("fragments", "pattern", "overlap_steps", "mixing")


def check_outer_step(plan: Plan) -> None:
    """Refuse settings of the outer step that are out of range or do not fit the method."""
    how, outer = plan.synchronisation, plan.synchronisation.outer
    if not how.has_outer_step:
        if outer != OuterStep():
            raise InputError(
                f"an outer step does not fit method '{how.method}'",
                where=_WHERE,
                valid=f"remove it, or choose the method {' or '.join(OUTER_METHODS)}",
            )
        return
    if how.staleness_bound is not None:
        raise InputError(
            f"a staleness bound of {how.staleness_bound} does not fit method '{how.method}', whose outer steps have "
            "a fixed place",
            where="synchronisation.staleness_bound",
            valid=f"remove it; with diloco-streaming, '{_WHERE}.overlap_steps' lets training go on meanwhile",
        )
    if not outer.learning_rate > 0:
        raise _refused("a learning rate", outer.learning_rate, "learning_rate", "give a number above 0; 0.7 is usual")
    if not 0 <= outer.momentum < 1:
        valid = "give a number from 0 to below 1; 0.9 is usual"
        raise _refused("a momentum", outer.momentum, "momentum", valid)
    _check_compression(outer)
    if how.method == "diloco":
        _check_plain(outer)
    else:
        _check_streaming(plan, outer)


def _check_compression(outer: OuterStep) -> None:
    known = dict.fromkeys(OUTER_COMPRESSIONS)
    find_by_name(outer.compression, known, "compression", where=f"{_WHERE}.compression")
    if not 0 < outer.density <= 1:
        raise _refused("a density", outer.density, "density", "give the share of values to send, above 0 and 1 at most")
    if not 0 <= outer.feedback <= 1:
        valid = "give the share of what was not sent that is kept, from 0 to 1"
        raise _refused("an error feedback", outer.feedback, "feedback", valid)


def _check_plain(outer: OuterStep) -> None:
    for name in _STREAMING:
        if getattr(outer, name) != getattr(OuterStep(), name):
            raise InputError(
                f"'{name}' does not fit method 'diloco', which exchanges the whole model at once",
                where=f"{_WHERE}.{name}",
                valid="remove it, or choose the method diloco-streaming",
            )


def _check_streaming(plan: Plan, outer: OuterStep) -> None:
    find_by_name(outer.pattern, dict.fromkeys(PATTERNS), "pattern", where=f"{_WHERE}.pattern")
    layers = max((stage.end_layer for stage in plan.stages), default=0)
    interval_steps = plan.synchronisation.interval_steps
    most = min(layers, interval_steps)
    if not 1 <= outer.fragments <= most:
        raise InputError(
            f"{outer.fragments} fragments of {layers} layers in {interval_steps} steps are not allowed",
            where=f"{_WHERE}.fragments",
            valid=f"give 1 to {most}: each fragment has a layer, and a step after which it is exchanged",
        )
    if not 0 <= outer.overlap_steps < interval_steps:
        raise InputError(
            f"an overlap of {outer.overlap_steps} steps is not allowed with {interval_steps} steps between exchanges",
            where=f"{_WHERE}.overlap_steps",
            valid=f"give 0 to {interval_steps - 1}, so that a fragment is applied before it is exchanged again",
        )
    if not 0 <= outer.mixing < 1:
        valid = "give the share of own parameters that is kept, from 0 to below 1"
        raise _refused("a mixing", outer.mixing, "mixing", valid)


def _refused(what: str, value: float, name: str, valid: str) -> InputError:
    return InputError(f"{what} of {value:g} is not allowed", where=f"{_WHERE}.{name}", valid=valid)
