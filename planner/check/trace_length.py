"""Traces that end last as long as the run must."""

from planner.check.paths import used_links
from planner.cost.stage import replica_times
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


def check_traces_last(scenario: Scenario, plan: Plan, steps: int) -> None:
    """Refuse a run of so many steps if the trace of a link that the plan uses surely ends before it.

    Only traces that end (`traces.trace.LinkTrace.ends`) can be too short; others loop or hold their last rate.

    Raises:
        InputError: With the link, the end of its trace, and how long the run lasts at least.
    """
    used = [link for link in used_links(plan, scenario) if link.trace is not None and link.trace.ends]
    if not used or scenario.effects.compute.jitter:
        # With jitter no run is sure to last so long; the simulator refuses one that did.
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


def step_at_least_s(scenario: Scenario, plan: Plan) -> float:
    """Return seconds that one step takes at least, jitter aside: the busiest device's compute at its best speed."""
    compute = scenario.effects.compute
    factors = {straggler.device: straggler.factor for straggler in compute.stragglers}
    fastest = {slowdown.device: max(slowdown.speed) for slowdown in compute.slowdowns}
    busy_s: dict[str, float] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            columns = zip(*(stage.intervals(samples) for samples in pipeline.microbatches), strict=True)
            for replica, intervals in zip(stage.replicas, columns, strict=True):
                widths = (end - first for first, end in intervals)
                once_s = sum(replica_times(scenario, stage, replica, width).total_s for width in widths)
                pace = factors.get(replica.device, 1.0) / fastest.get(replica.device, 1.0)
                busy_s[replica.device] = busy_s.get(replica.device, 0.0) + once_s * pace
    return max(busy_s.values())
