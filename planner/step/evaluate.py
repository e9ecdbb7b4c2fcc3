"""How long one step of a plan takes on steady links: the quick judge of candidate plans, in compiled code.

Each ordered device pair is a channel of its own that carries one transfer at a time. On constant links that no
two channels share, this is exactly what the simulator's events give; a test holds the two together.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.cost.link_sharing import Pair, sharers, slowed_paths
from planner.cost.network import ConstantRatePath, Paths, jitter_delay_s, nominal_path, payload_bps
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.compile import CompiledStep, compile_step
from planner.step.graph import Flags, Floats, longest_path, longest_paths, walk
from planner.step.tables import SYNC
from traces.common.errors import InputError


def step_time_s(
    plan: Plan, scenario: Scenario, path: Paths | None = None, slowdown: Mapping[str, float] | None = None
) -> float:
    """Return the makespan of one step in seconds.

    Args:
        plan: A checked plan.
        scenario: What it is for.
        path: The path from one device to another; the declared bandwidths and latencies if None.
        slowdown: Device to the factor by which its compute takes longer than profiled.

    Raises:
        InputError: The order of actions deadlocks.
    """
    step = compile_step(plan, scenario)
    sequence, acting, position = walk(step.graph)
    if len(sequence) < step.graph.actions:
        actor = int(np.flatnonzero(position < step.graph.first_action[1:])[0])
        raise InputError(f"the order of actions deadlocks: device '{step.actors[actor]}' waits for ever")
    transmission_s, latency_s = message_times(step, path or nominal_paths(plan, scenario))
    blocking = blocking_messages(step, scenario)
    durations_s = _durations_s(step, slowdown)
    return float(longest_path(step.graph, sequence, acting, durations_s, transmission_s, latency_s, blocking))


def step_times_s(plan: Plan, scenario: Scenario, networks: Sequence[Paths]) -> Floats:
    """Return the makespan of one step in seconds on each of many networks, [networks].

    The graph is built once; robust planning scores a plan over many windows of its traces.
    """
    step = compile_step(plan, scenario)
    sequence, acting, _ = walk(step.graph)
    times = [message_times(step, path) for path in networks]
    duration_s = np.broadcast_to(step.actions.duration_s, (len(times), len(step.actions.duration_s)))
    transmission_s = np.array([each for each, _ in times])
    latency_s = np.array([each for _, each in times])
    blocking = blocking_messages(step, scenario)
    return np.asarray(
        longest_paths(step.graph, sequence, acting, duration_s.copy(), transmission_s, latency_s, blocking)
    )


def nominal_paths(plan: Plan, scenario: Scenario) -> Paths:
    """Return the paths between the plan's devices at declared bandwidths, with the plan's connections."""
    return lambda source, target: nominal_path(scenario, source, target, plan.connections)


def message_times(step: CompiledStep, path: Paths) -> tuple[Floats, Floats]:
    """Return for how long each message keeps its path busy and how long its way is, in seconds, [messages] each."""
    graph, paths = step.graph, _channel_paths(step, path)
    if not paths:
        return np.empty(0), np.empty(0)
    latency_s = np.array([each.latency_s for each in paths])[graph.channel] + _jitter_delays_s(step, paths)
    transmission_s = 8 * step.messages.size_bytes / np.array([each.rate_bps for each in paths])[graph.channel]
    for channel in (number for number, each in enumerate(paths) if each.curves):
        own = graph.channel == channel
        sizes, which = np.unique(step.messages.size_bytes[own], return_inverse=True)
        transmission_s[own] = np.array([paths[channel].transmission_s(size) for size in sizes.tolist()])[which]
    return transmission_s, latency_s


def jitter_delays_s(step: CompiledStep, path: Paths) -> Floats:
    """Return how much of each message's way is the jitter of its packets, seconds, [messages]."""
    return _jitter_delays_s(step, _channel_paths(step, path))


def _jitter_delays_s(step: CompiledStep, paths: Sequence[ConstantRatePath]) -> Floats:
    delays_s = np.zeros(step.graph.messages)
    for channel, each in enumerate(paths):
        if each.jitter_s:
            own = step.graph.channel == channel
            sizes, which = np.unique(step.messages.size_bytes[own], return_inverse=True)
            delays_s[own] = np.array([jitter_delay_s(each.jitter_s, size) for size in sizes.tolist()])[which]
    return delays_s


def _channel_paths(step: CompiledStep, path: Paths) -> list[ConstantRatePath]:
    graph = step.graph
    channels = zip(graph.channel_sender.tolist(), graph.channel_receiver.tolist(), strict=True)
    return [path(step.actors[sender], step.actors[receiver]) for sender, receiver in channels]


def blocking_messages(step: CompiledStep, scenario: Scenario) -> Flags:
    """Return for which messages sender and receiver wait, [messages]: transfers between stages, if they block."""
    if not scenario.effects.compute.transfers_block:
        return np.zeros(step.graph.messages, np.bool_)
    return np.asarray(step.actions.kind[step.messages.receiver] != SYNC, np.bool_)


def _durations_s(step: CompiledStep, slowdown: Mapping[str, float] | None) -> Floats:
    if not slowdown:
        return step.actions.duration_s
    factors = np.array([slowdown.get(actor, 1.0) for actor in step.actors])
    return np.asarray(step.actions.duration_s * factors[step.actions.actor], np.float64)


def contended_paths(plan: Plan, scenario: Scenario) -> Paths:
    """Return the paths of a plan at declared bandwidths, each with what others leave it of its links."""
    return slowed_paths(plan, scenario, contention_factors(plan, scenario))


@lru_cache(maxsize=256)
def contention_factors(plan: Plan, scenario: Scenario) -> Mapping[Pair, float]:
    """Return how many times as long each pair's transfers take as on links of their own, at declared bandwidths."""
    paths = nominal_paths(plan, scenario)
    between = _busy_s(compile_step(plan, scenario), paths)
    factors: dict[Pair, float] = {**sharers(plan, scenario)}
    if _share(between, scenario):
        step_s = step_time_s(plan, scenario, paths)
        flows = _Flows({pair: min(1.0, each / step_s) for pair, each in between.items()}, scenario, paths)
        factors |= {pair: flows.factor(pair) for pair in between}
    return factors


@dataclass(frozen=True, slots=True)
class _Flows:
    """Pairs of devices that send, each with the share of the time for which it does."""

    busy: Mapping[Pair, float]
    scenario: Scenario
    paths: Paths

    def factor(self, pair: Pair) -> float:
        """How many times as long a transfer takes as alone."""
        longest = 1.0
        for link in self.scenario.cluster.path(*pair):
            others = [
                (1.0 if other[0] == pair[0] else self.busy[other], self.paths(*other).rate_bps)
                for other in self.busy
                if other != pair and link in self.scenario.cluster.path(*other)
            ]
            whole_bps = payload_bps(self.scenario.effects.network, link.bandwidth_bps)
            own_bps = self.paths(*pair).rate_bps
            # Who gets less elsewhere leaves the rest; nobody gets less than an equal part.
            wanted_bps = sum(share * rate_bps for share, rate_bps in others)
            equal_bps = whole_bps / (1 + sum(share for share, _ in others))
            left_bps = max(equal_bps, whole_bps - wanted_bps)
            longest = max(longest, own_bps / left_bps)
        return longest


def _busy_s(step: CompiledStep, paths: Paths) -> dict[Pair, float]:
    """For how long a step's transfers between stages keep each pair of devices busy, seconds."""
    transmission_s, _ = message_times(step, paths)
    graph, between = step.graph, step.actions.kind[step.messages.receiver] != SYNC
    seconds = np.bincount(graph.channel[between], transmission_s[between], len(graph.channel_sender)).tolist()
    pairs = zip(graph.channel_sender.tolist(), graph.channel_receiver.tolist(), strict=True)
    busy: defaultdict[Pair, float] = defaultdict(float)
    for (sender, receiver), each in zip(pairs, seconds, strict=True):
        if each:
            busy[step.actors[sender], step.actors[receiver]] += each
    return dict(busy)


def _share(busy: Mapping[Pair, float], scenario: Scenario) -> bool:
    """Whether any two pairs have a link in common."""
    links = [link.name for pair in busy for link in scenario.cluster.path(*pair)]
    return len(set(links)) < len(links)
