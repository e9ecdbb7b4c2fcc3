"""Measures the gain of adaptation on recorded traces: policies `auto` and `deepcee` against a plan that never changes.

Each pair of traces plays on the two links between regions of `cloud-edge-end`. All runs start with the plan that `auto`
makes for the mean rates and latencies of the first minute. For comparison there are two figures in hindsight, over the
starting plan, the plans that the policies ran or `auto` considered, and a plan for the means of the whole trace:

- the throughput of the plan that is best over the whole trace without any change;
- the throughput with the best plan in each window of the trace, if it were known ahead and changes took no time.

Further checks compare the gains that the simulator predicts with those of real, paced runs.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import numpy as np

from executor.backend import TorchBackend, choose_emulator
from experiments.benches.cases import TRACES_VARIABLE
from experiments.benches.planning.adaptation_traces import DURATION_S, TracePair, trace_pairs
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from experiments.runs.scenario import choose_scenario
from planner.adapt.policy import Policy
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.runs.record import Backend, RunRecord
from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_times_s
from planner.step.graph import Floats
from planner.systems.auto.forecast import LEAST_BPS, LinkSample, forecast_paths
from planner.systems.auto.policy import AutoPolicy
from planner.systems.auto.portfolio import searched_once
from planner.systems.deepcee.policy import DeepceePolicy
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator
from traces.trace import LinkTrace

REAL_SCENARIO = "two-regions"

# Pairs of the strategy of the first plan and the policy. `depth` changes only how many microbatches are in flight; the
# other policies also move layers.
GAINING = (("megatron", "depth"), ("pipedream", "depth"))
MOVING = (("deepcee", "deepcee"), ("megatron", "auto"))

# Number of steps of the runs in both backends: with every plan they last until the link's rate has recovered.
REAL_STEPS = 50

LEAST_REAL_GAIN = 1.05
WORST_GAIN_DIFFERENCE = 0.05


def real_checks(tell: Callable[[str], None]) -> list[Check]:
    """Run plans with and without a policy in both backends; check that simulated and real gains agree."""
    scenario = choose_scenario(REAL_SCENARIO)
    real = TorchBackend("paced", emulator=choose_emulator("auto", tell), tell=tell)
    backends: dict[str, Backend] = {"simulated": Simulator(), "real": real}
    least, worst, moving = math.inf, 0.0, 0
    for strategy, policy in (*GAINING, *MOVING):
        plan = make_plan(strategy, scenario)
        gains = {}
        for name, backend in backends.items():
            plain = backend.run(scenario, plan, None, REAL_STEPS)
            adapted = backend.run(scenario, plan, make_policy(policy, scenario), REAL_STEPS)
            gains[name] = measure(adapted).samples_per_s / measure(plain).samples_per_s
            tell(f"{REAL_SCENARIO}, {strategy}, policy {policy}, {name}: gain {gains[name]:.3f}")
            moving += any(decision.migration.moves for decision in adapted.decisions)
        if (strategy, policy) in GAINING:
            least = min(least, *gains.values())
        worst = max(worst, abs(gains["simulated"] - gains["real"]))
    return [
        at_least("two regions: least gain of policy depth, simulated or real", least, LEAST_REAL_GAIN),
        at_least("two regions: runs in which layers moved", moving, 1),
        at_most("two regions: worst difference of simulated and real gain", worst, WORST_GAIN_DIFFERENCE),
    ]


SCENARIO = "cloud-edge-end"
FIRST_MINUTE_S = 60.0

QUICK_TRACES = ("preset lte", "preset rail-lte", "preset satellite")
QUICK_DURATION_S = 600.0

# Interval at which the latencies of a trace are sampled, seconds.
SAMPLE_EVERY_S = 1.0

# Length of the windows on which plans are judged in hindsight, seconds.
WINDOW_S = 10.0

LEAST_MEAN_GAIN = 1.25
LEAST_GAIN = 0.98

# A number of steps that no run reaches, since runs end after their duration.
_ENDLESS = 10**9


def measure_adaptation(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Simulate all pairs of traces with and without policies, and run two regions for real unless ``quick``."""
    folder = Path(os.environ[TRACES_VARIABLE]) if TRACES_VARIABLE in os.environ else None
    if folder is None:
        tell(f"only presets: {TRACES_VARIABLE} names no folder of recorded traces")
    links = wide_area_links(choose_scenario(SCENARIO))
    nominal_bps = (links[0].bandwidth_bps, links[1].bandwidth_bps)
    pairs = [pair for pair in trace_pairs(folder, nominal_bps) if not quick or pair.name in QUICK_TRACES]
    rows: list[Row] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for row in pool.map(measure_pair, pairs, repeat(QUICK_DURATION_S if quick else DURATION_S)):
            rows.append(row)
            tell(f"{row['trace']}: auto {row['auto_gain']:.3f}, deepcee {row['deepcee_gain']:.3f}")
    if quick:
        tell("the real runs are left out")
    return BenchResult(rows, [*checks(rows), *([] if quick else real_checks(tell))])


def checks(rows: Sequence[Row]) -> list[Check]:
    """Return the checks of the gains of `auto`, which are its throughput divided by that without a policy."""
    gains = [float(row["auto_gain"]) for row in rows]
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    return [
        at_least("geometric mean of auto / none", mean, LEAST_MEAN_GAIN),
        at_least("least auto / none", min(gains), LEAST_GAIN),
    ]


def measure_pair(pair: TracePair, duration_s: float) -> Row:
    """Simulate one pair of traces for ``duration_s`` seconds without a policy and with each policy; return its row."""
    scenario = with_traces(choose_scenario(SCENARIO), pair.traces)
    start = searched_once(_at_means(scenario, 0.0, FIRST_MINUTE_S))[0]
    plain = _run(scenario, start, None, duration_s)
    deepcee = _run(scenario, start, DeepceePolicy(scenario), duration_s)
    policy = AutoPolicy(scenario, searched_once)
    adapted = _run(scenario, start, policy, duration_s)
    rates = {name: measure(run).samples_per_s for name, run in (("p", plain), ("d", deepcee), ("a", adapted))}
    others = {*policy.portfolio.plans(), *(decision.plan for decision in (*deepcee.decisions, *adapted.decisions))}
    others.add(searched_once(_at_means(scenario, 0.0, duration_s))[0])
    plans = [start, *sorted(others - {start}, key=repr)]
    static_per_s, known_ahead_per_s = _hindsight(scenario, plans, rates["p"], duration_s)
    return {
        "trace": pair.name,
        "scaled": "yes" if pair.scaled else "no",
        "none_per_s": rates["p"],
        "deepcee_per_s": rates["d"],
        "auto_per_s": rates["a"],
        "deepcee_gain": rates["d"] / rates["p"],
        "auto_gain": rates["a"] / rates["p"],
        "best_static_per_s": static_per_s,
        "known_ahead_per_s": known_ahead_per_s,
        "start_regret": 1 - rates["p"] / static_per_s,
        "auto_regret": 1 - rates["a"] / static_per_s,
        "decisions": len(adapted.decisions),
        "moved_mb": sum(decision.migration.size_bytes for decision in adapted.decisions) / 1e6,
    }


def wide_area_links(scenario: Scenario) -> list[Link]:
    """Return one direction of each link between two regions, in the scenario's order."""
    by_ends: dict[frozenset[str], Link] = {}
    for link in scenario.cluster.links:
        if link.source != link.target:
            by_ends.setdefault(frozenset((link.source, link.target)), link)
    return list(by_ends.values())


def with_traces(scenario: Scenario, traces: Sequence[LinkTrace]) -> Scenario:
    """Return the scenario with a trace on each link between regions, the same in both directions."""
    by_ends = {
        frozenset((link.source, link.target)): trace
        for link, trace in zip(wide_area_links(scenario), traces, strict=True)
    }
    links = tuple(
        replace(link, trace=by_ends.get(frozenset((link.source, link.target)))) for link in scenario.cluster.links
    )
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))


def _run(scenario: Scenario, plan: Plan, policy: Policy | None, duration_s: float) -> RunRecord:
    return Simulator(duration_s=duration_s).run(scenario, plan, policy, _ENDLESS)


def _at_means(scenario: Scenario, start_s: float, end_s: float) -> Scenario:
    """Return the scenario with constant links, whose rates and latencies are means from ``start_s`` to ``end_s``."""
    links = []
    for link in scenario.cluster.links:
        if link.trace is not None:
            mean_bps = float(link.trace.bits_between(start_s, end_s)) / (end_s - start_s)
            moments_s = np.arange(start_s, end_s, SAMPLE_EVERY_S)
            latency_s = float(np.mean([_latency_s(link, moment_s) for moment_s in moments_s]))
            link = replace(link, bandwidth_bps=max(mean_bps, LEAST_BPS), latency_s=latency_s)
        links.append(replace(link, trace=None))
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, tuple(links)))


def _latency_s(link: Link, moment_s: float) -> float:
    if link.trace is None or link.trace.latency_s is None:
        return link.latency_s
    return float(link.trace.latency_s[link.trace.piece_at(moment_s)])


def _hindsight(scenario: Scenario, plans: Sequence[Plan], start_per_s: float, duration_s: float) -> tuple[float, float]:
    """Return the throughput with the best plan of the whole trace, and with the best plan of each window, samples/s.

    The first throughput is simulated. The second is the first times the gain that the evaluator predicts from changing
    plans. ``start_per_s`` is the throughput of the first plan, which has been simulated already.
    """
    windows = [_window(scenario, WINDOW_S * number) for number in range(int(duration_s / WINDOW_S))]

    def rates_per_s(plan: Plan) -> Floats:
        networks = [forecast_paths(plan, scenario, window) for window in windows]
        return plan.global_batch / step_times_s(plan, scenario, networks)

    judged_per_s = np.stack([rates_per_s(plan) for plan in plans])
    means_per_s = judged_per_s.mean(axis=1)
    best_per_s = start_per_s
    if len(plans) > 1:
        simulated = _run(scenario, plans[1 + int(means_per_s[1:].argmax())], None, duration_s)
        best_per_s = max(best_per_s, measure(simulated).samples_per_s)
    known_ahead = float(judged_per_s.max(axis=0).mean() / means_per_s.max())
    return best_per_s, best_per_s * known_ahead


def _window(scenario: Scenario, start_s: float) -> dict[str, LinkSample]:
    samples = {}
    for link in scenario.cluster.links:
        if link.trace is not None:
            rate_bps = float(link.trace.bits_between(start_s, start_s + WINDOW_S)) / WINDOW_S
            samples[link.name] = LinkSample(rate_bps, _latency_s(link, start_s), WINDOW_S)
    return samples
