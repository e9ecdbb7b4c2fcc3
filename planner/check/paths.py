"""Checks of communication: synchronisation settings, a path for each pair that communicates, and trace lengths."""

from collections.abc import Callable, Iterator
from itertools import chain, combinations

from planner.check.outer_step import check_outer_step
from planner.cost.device_transport import NCCL, boundary_transport, group_transport
from planner.cost.stage import stage_times
from planner.cost.synchronisation import gradient_syncs, syncer_pairs
from planner.plan.plan import ALGORITHMS, METHODS, Pipeline, Plan
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError, find_by_name


def check_paths(plan: Plan, scenario: Scenario) -> None:
    """Refuse a plan in which two devices communicate that no path connects."""
    for source, target in communicating_pairs(plan, scenario):
        scenario.cluster.path(source, target)


def communicating_pairs(plan: Plan, scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Yield the (source, target) devices between which the plan sends bytes; pairs may repeat."""
    for pipeline in plan.pipelines:
        yield from between_stages(pipeline)
        for stage in pipeline.stages:
            for replica in stage.replicas:
                yield from _both_ways(combinations(replica.devices, 2))
    for sync in gradient_syncs(plan, scenario):
        for device in sync.devices:
            receivers = dict.fromkeys(exchange.send_to for exchange in sync.exchanges(device))
            yield from ((device, sync.devices[receiver]) for receiver in receivers if receiver is not None)
    if plan.synchronisation.is_decoupled:
        yield from syncer_pairs(plan)
    elif plan.synchronisation.method != "allreduce":
        for one, other in combinations(plan.pipelines, 2):
            yield from _both_ways(_copies(one, other))


def used_links(
    plan: Plan, scenario: Scenario, counts: Callable[[str, str], bool] = lambda *_: True
) -> tuple[Link, ...]:
    """Return the links that the plan sends anything over, in the order of `communicating_pairs`.

    ``counts`` says of a pair of devices whether its messages count.

    Raises:
        InputError: Two devices that communicate have no path.
    """
    paths = (
        scenario.cluster.path(*pair) for pair in dict.fromkeys(communicating_pairs(plan, scenario)) if counts(*pair)
    )
    return tuple(dict.fromkeys(link for path in paths for link in path))


def between_stages(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Yield the (source, target) devices of neighbouring stages of a pipeline, in both directions."""
    for senders, receivers in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        pairs = ((s.device, r.device) for s in senders.replicas for r in receivers.replicas)
        yield from _both_ways((source, target) for source, target in pairs if source != target)


def nccl_boundaries(plan: Plan, scenario: Scenario) -> list[tuple[str, str]]:
    """Return the (source, target) devices of neighbouring stages between which NCCL carries messages."""
    pairs = dict.fromkeys(pair for pipeline in plan.pipelines for pair in between_stages(pipeline))
    return [pair for pair in pairs if boundary_transport(plan, scenario, *pair) == NCCL]


def nccl_pairs(plan: Plan, scenario: Scenario) -> list[tuple[str, str]]:
    """Return the pairs of devices between which NCCL carries messages, between stages or inside a group."""
    groups = [replica.devices for replica in plan.replicas if replica.partners]
    inside = [combinations(group, 2) for group in groups if group_transport(scenario, group) == NCCL]
    return [*nccl_boundaries(plan, scenario), *chain.from_iterable(inside)]


def _copies(one: Pipeline, other: Pipeline) -> Iterator[tuple[str, str]]:
    """Yield the pairs of devices that send each other updates: first replicas of stages with a layer in common."""
    for stage in one.stages:
        for match in other.stages:
            if stage.first_layer < match.end_layer and match.first_layer < stage.end_layer:
                yield stage.replicas[0].device, match.replicas[0].device


def _both_ways(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for source, target in pairs:
        yield source, target
        yield target, source


def check_traces_last(scenario: Scenario, plan: Plan, steps: int) -> None:
    """Refuse a run of ``steps`` steps that is certain to last longer than the trace of a link that the plan uses.

    Only traces with `traces.trace.LinkTrace.ends` can be too short; other traces loop or hold their last rate.
    """
    used = [link for link in used_links(plan, scenario) if link.trace is not None and link.trace.ends]
    if not used or scenario.effects.compute.jitter:
        # With jitter there is no lower bound on the run's length; the simulator refuses a run that has lasted too long.
        return
    shortest_s = steps * step_at_least_s(scenario, plan)
    for link in used:
        assert link.trace is not None
        if link.trace.duration_s < shortest_s:
            enough = int(link.trace.duration_s / (shortest_s / steps))
            fewer = f", or run at most {enough} steps" if enough else ""
            raise InputError(
                f"the trace of link {link.name} ends at {link.trace.duration_s:g} s, but {steps} steps last "
                f"{shortest_s:g} s or more",
                where=f"cluster.links[{scenario.cluster.links.index(link)}].trace",
                valid=f"let it loop ('after: loop') or give a longer one{fewer}",
            )


def outlasted_traces(scenario: Scenario, plan: Plan, lasted_s: float) -> Iterator[str]:
    """Yield a line for each link that a plan uses whose trace, with `traces.trace.LinkTrace.ends`, was too short."""
    for link in used_links(plan, scenario):
        if link.trace is not None and link.trace.ends and link.trace.duration_s < lasted_s:
            yield (
                f"the run lasted {lasted_s:.3f} s, but the trace of link {link.name} ends at "
                f"{link.trace.duration_s:g} s: from then on the link had its last rate"
            )


def step_at_least_s(scenario: Scenario, plan: Plan) -> float:
    """Return a lower bound on a step's seconds without jitter: the busiest device's compute at its highest speed."""
    compute = scenario.effects.compute
    factors = {straggler.device: straggler.factor for straggler in compute.stragglers}
    fastest = {slowdown.device: max(slowdown.speed) for slowdown in compute.slowdowns}
    busy_s: dict[str, float] = {}
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            columns = zip(*(stage.intervals(samples) for samples in pipeline.microbatches), strict=True)
            for replica, intervals in zip(stage.replicas, columns, strict=True):
                widths = (end - first for first, end in intervals)
                once_s = sum(stage_times(scenario, pipeline, index, replica, width).total_s for width in widths)
                pace = factors.get(replica.device, 1.0) / fastest.get(replica.device, 1.0)
                busy_s[replica.device] = busy_s.get(replica.device, 0.0) + once_s * pace
    return max(busy_s.values())


_ALLREDUCE = "allreduce"
# Methods that exchange in every step.
_EVERY_STEP = (_ALLREDUCE, "asgd")

_WHERE = "synchronisation"


def check_synchronisation(plan: Plan) -> None:
    """Refuse settings of synchronisation that are unknown or do not fit the plan."""
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
            f"a staleness bound of {how.staleness_bound} does not fit method '{_ALLREDUCE}': all pipelines wait",
            where=f"{_WHERE}.staleness_bound",
            valid="remove it, or choose a method that does not wait: asgd, asgd-ga or ma",
        )
    check_outer_step(plan)
    if how.staleness_bound is not None and how.staleness_bound < 0:
        raise InputError(
            f"a staleness bound of {how.staleness_bound} is not allowed",
            where=f"{_WHERE}.staleness_bound",
            valid="give a number of steps, 0 or more, or leave it out for no bound",
        )
    if how.bucket_bytes:
        _check_overlap(plan)
    if how.method != _ALLREDUCE and not how.has_outer_step and len(plan.pipelines) == 1:
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
            f"buckets of {how.bucket_bytes} bytes do not fit method '{how.method}', with which no device waits",
            where=where,
            valid=f"remove it, or write method '{_ALLREDUCE}'",
        )
    if plan.order == "dynamic":
        raise InputError(
            f"buckets of {how.bucket_bytes} bytes do not fit order 'dynamic': which backward is last is not known",
            where=where,
            valid="remove it, or write order 'scheduled'",
        )
