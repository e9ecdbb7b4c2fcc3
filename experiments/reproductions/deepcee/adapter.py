"""The gain of DeepCEE's adapter, the policy ``deepcee``, while a link between two regions changes.

A link drops for good, or follows a trace of real paths whose mean is the rate that the scenario declares: the planner
knows the truth about the link's mean, and nothing about its changes. A drop happens after planning, at the declared
rate. In the simulator a search takes the time of its candidates (`planner.systems.deepcee.policy.CANDIDATE_S`).
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from experiments.benches.result import Row
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from sim.simulator import Simulator
from traces.generators.presets import preset
from traces.trace import LinkTrace

# A drop to a share of the rate happens in the step that this part of the run has reached.
DROPS = (0.5, 0.3)
DROP_AFTER_STEPS = 10
STEPS = 60

PRESETS = ("5g-mmwave", "lte", "satellite")
TRACE_S = 600.0


def changing_links(rate_bps: float, step_s: float) -> Mapping[str, LinkTrace]:
    """Return traces for a link with this declared rate, by what happens, for a run whose steps take ``step_s``."""
    drop_s = np.array([0.0, DROP_AFTER_STEPS * step_s])
    drops = {f"drop to {share:.0%}": LinkTrace(drop_s, np.array([1, share]) * rate_bps, 1e6) for share in DROPS}
    return {**drops, **{f"trace {name}": _with_mean(name, rate_bps) for name in PRESETS}}


def adapter_row(scenario: Scenario, plan: Plan, ends: frozenset[str], trace: LinkTrace) -> Row:
    """Return the throughput of a plan with and without the adapter, while the links between ``ends`` follow a trace."""
    links = tuple(
        replace(link, trace=trace) if {link.source, link.target} == ends else link for link in scenario.cluster.links
    )
    changing = replace(scenario, cluster=Cluster(scenario.cluster.devices, links))
    without = measure(Simulator().run(changing, plan, None, STEPS)).samples_per_s
    record = Simulator().run(changing, plan, make_policy("deepcee", changing), STEPS)
    adapted = measure(record).samples_per_s
    return {
        "whole": adapted,
        "without": without,
        "gain": adapted / without,
        "decisions": len(record.decisions),
        "moves": sum(bool(decision.migration.moves) for decision in record.decisions),
    }


def _with_mean(name: str, mean_bps: float) -> LinkTrace:
    trace = preset(name, duration_s=TRACE_S, seed=0)
    return replace(trace, bandwidth_bps=trace.bandwidth_bps * (mean_bps / trace.mean_bps))
