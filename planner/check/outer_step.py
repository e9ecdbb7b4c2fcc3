"""Checks of the outer step of DiLoCo."""

from math import inf

from planner.plan.outer_step import EXCHANGES, OUTER_COMPRESSIONS, PATTERNS, REDUCE_SCATTER, OuterStep
from planner.plan.plan import DECOUPLED, OUTER_METHODS, Plan
from planner.scenario.cluster import Cluster
from traces.common.errors import InputError, find_by_name

_WHERE = "synchronisation.outer"

# The settings with other values than these need the method that streams.
_STREAMING = ("fragments", "pattern", "overlap_steps", "mixing")
_DECOUPLED = ("quorum", "grace_s", "syncers")
_WITHOUT_SYNCERS = ("exchange",)


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
        why = "with which no pipeline waits" if how.is_decoupled else "whose outer steps have a fixed place"
        raise InputError(
            f"a staleness bound of {how.staleness_bound} does not fit method '{how.method}', {why}",
            where="synchronisation.staleness_bound",
            valid=f"remove it; '{_WHERE}.overlap_steps' lets training go on meanwhile, except with diloco",
        )
    if not outer.learning_rate > 0:
        raise _refused("a learning rate", outer.learning_rate, "learning_rate", "give a number above 0; 0.7 is usual")
    if not 0 <= outer.momentum < 1:
        valid = "give a number from 0 to below 1; 0.9 is usual"
        raise _refused("a momentum", outer.momentum, "momentum", valid)
    _check_compression(outer)
    if how.is_decoupled:
        _check_quorum(plan, outer)
        _check_plain(how.method, outer, _WITHOUT_SYNCERS, "has syncers", " or ".join(OUTER_METHODS[:-1]))
    else:
        _check_plain(how.method, outer, _DECOUPLED, "waits for all pipelines", DECOUPLED)
    if how.method == "diloco":
        whole = "exchanges the whole model at once"
        _check_plain(how.method, outer, _STREAMING, whole, f"diloco-streaming or {DECOUPLED}")
    else:
        _check_streaming(plan, outer)


def check_syncers(plan: Plan, cluster: Cluster) -> None:
    """Refuse devices for outer steps that are unknown, train layers or are named twice, and a plan without any."""
    if not plan.synchronisation.is_decoupled:
        return
    syncers, where = plan.synchronisation.outer.syncers, f"{_WHERE}.syncers"
    if not syncers:
        raise InputError(
            f"method '{DECOUPLED}' needs a device that takes the outer steps",
            where=where,
            valid="name devices that no pipeline uses; they need no GPU",
        )
    for number, name in enumerate(syncers):
        place = f"{where}[{number}]"
        find_by_name(name, cluster.by_name, "device", where=place)
        if name in plan.devices or name in syncers[:number]:
            raise InputError(
                f"device '{name}' {'trains layers' if name in plan.devices else 'is named twice'}",
                where=place,
                valid="name devices that no pipeline uses, each once",
            )


def _check_compression(outer: OuterStep) -> None:
    known = dict.fromkeys(OUTER_COMPRESSIONS)
    find_by_name(outer.compression, known, "compression", where=f"{_WHERE}.compression")
    if not 0 < outer.density <= 1:
        raise _refused("a density", outer.density, "density", "give the share of values to send, above 0 and 1 at most")
    if not 0 <= outer.feedback <= 1:
        valid = "give the share of what was not sent that is kept, from 0 to 1"
        raise _refused("an error feedback", outer.feedback, "feedback", valid)
    if outer.exchange is not None:
        find_by_name(outer.exchange, dict.fromkeys(EXCHANGES), "exchange", where=f"{_WHERE}.exchange")
    if outer.exchange == REDUCE_SCATTER and outer.density < 1:
        raise InputError(
            f"exchange '{REDUCE_SCATTER}' does not fit a density of {outer.density:g}: means of few values are many",
            where=f"{_WHERE}.exchange",
            valid="remove it, or give a density of 1",
        )


def _check_plain(method: str, outer: OuterStep, names: tuple[str, ...], why: str, others: str) -> None:
    """Refuse settings other than the defaults, since the method does something else; ``others`` would fit."""
    for name in names:
        if getattr(outer, name) != getattr(OuterStep(), name):
            raise InputError(
                f"'{name}' does not fit method '{method}', which {why}",
                where=f"{_WHERE}.{name}",
                valid=f"remove it, or choose the method {others}",
            )


def _check_quorum(plan: Plan, outer: OuterStep) -> None:
    count = len(plan.pipelines)
    if outer.quorum is not None and not 1 <= outer.quorum <= count:
        valid = f"give 1 to {count}, the number of pipelines, or leave it out"
        raise _refused("a quorum", outer.quorum, "quorum", valid)
    if outer.grace_s is not None and not 0 <= outer.grace_s < inf:
        valid = "give the seconds to wait for further pipelines, 0 or more, or null for as long as none is delayed"
        raise _refused("a grace", outer.grace_s, "grace_s", valid)


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
