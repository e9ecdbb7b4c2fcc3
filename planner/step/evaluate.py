"""Step times of plans at constant rates, in compiled code: the judge of candidate plans.

Each ordered pair of devices is a channel of its own that carries one message at a time. On constant links that no two
channels share, the times are exactly those of the simulator's events; a test compares the two.

Where channels share links, `contended_paths` estimates how much longer transfers take. What one device sends to several
others leaves at the same moment and surely shares a link. Other flows meet now and then, as activations that go forward
while gradients come back over the same LAN: taken as independent, a flow meets another one for the part of the step for
which that one is busy. Whenever flows meet, a link gives each its fair share. Sums of gradients meet those of the same
round of their ring (`planner.cost.link_sharing`). A simulation is exact.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
        plan: A plan that passes the check.
        scenario: Scenario that the plan is for.
        path: Path from one device to another; the declared bandwidths and latencies if None.
        slowdown: Factor by which the compute of devices takes longer than profiled, by device.

    Raises:
        InputError: The order of actions deadlocks.
    """
    step = compile_step(plan, scenario)
    times = message_times(step, path or nominal_paths(plan, scenario))
    return makespan_s(step, scenario, slowed_durations_s(step, slowdown or {}), *times)


def makespan_s(
    step: CompiledStep, scenario: Scenario, duration_s: Floats, transmission_s: Floats, latency_s: Floats
) -> float:
    """Return the makespan of a step whose actions and messages take these times, seconds.

    Args:
        step: The compiled step to evaluate.
        scenario: Says whether transfers block.
        duration_s: Duration of each action, seconds, [actions].
        transmission_s: Time for which each message keeps its path busy, seconds, [messages].
        latency_s: Time from each message's departure to its arrival, seconds, [messages].

    Raises:
        InputError: The order of actions deadlocks.
    """
    sequence, acting, position = walk(step.graph)
    if len(sequence) < step.graph.actions:
        actor = int(np.flatnonzero(position < step.graph.first_action[1:])[0])
        raise InputError(f"the order of actions deadlocks: device '{step.actors[actor]}' waits for ever")
    blocking = blocking_messages(step, scenario)
    return float(longest_path(step.graph, sequence, acting, duration_s, transmission_s, latency_s, blocking))


def step_times_s(plan: Plan, scenario: Scenario, networks: Sequence[Paths]) -> Floats:
    """Return the makespan of one step in seconds on each of many networks, [networks].

    The graph is built once: robust planning scores a plan in many windows of its traces.
    """
    step = compile_step(plan, scenario)
    sequence, acting, _ = walk(step.graph)
    times = [message_times(step, path) for path in networks]
    transmission_s, latency_s = (np.array(each) for each in zip(*times, strict=True))
    duration_s = np.tile(step.actions.duration_s, (len(networks), 1))
    blocking = blocking_messages(step, scenario)
    return np.asarray(longest_paths(step.graph, sequence, acting, duration_s, transmission_s, latency_s, blocking))


def nominal_paths(plan: Plan, scenario: Scenario) -> Paths:
    """Return the paths between a plan's devices at declared bandwidths, with the plan's number of connections."""
    return lambda source, target: nominal_path(scenario, source, target, plan.connections)


def message_times(step: CompiledStep, path: Paths) -> tuple[Floats, Floats]:
    """Return how long each message keeps its path busy, and its latency with jitter, in seconds, [messages] each."""
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
    """Return the part of each message's latency that is the jitter of its packets, seconds, [messages]."""
    return _jitter_delays_s(step, _channel_paths(step, path))


def _jitter_delays_s(step: CompiledStep, paths: Sequence[ConstantRatePath]) -> Floats:
    delays_s = np.zeros(step.graph.messages)
    for channel, each in enumerate(paths):
        if each.jitter_s:
            own = step.graph.channel == channel
            sizes, which = np.unique(step.messages.size_bytes[own], return_inverse=True)
            delays_s[own] = np.array([jitter_delay_s(each.jitter_s, size) for size in sizes.tolist()])[which]
    return delays_s


def _channel_pairs(step: CompiledStep) -> list[Pair]:
    """Return the devices that send and receive on each channel."""
    channels = zip(step.graph.channel_sender.tolist(), step.graph.channel_receiver.tolist(), strict=True)
    return [(step.actors[sender], step.actors[receiver]) for sender, receiver in channels]


def _channel_paths(step: CompiledStep, path: Paths) -> list[ConstantRatePath]:
    return [path(*pair) for pair in _channel_pairs(step)]


def blocking_messages(step: CompiledStep, scenario: Scenario) -> Flags:
    """Return for which messages sender and receiver wait, [messages]: transfers between stages, if they block."""
    if not scenario.effects.compute.transfers_block:
        return np.zeros(step.graph.messages, np.bool_)
    return np.asarray(step.actions.kind[step.messages.receiver] != SYNC, np.bool_)


def slowed_durations_s(step: CompiledStep, slowdown: Mapping[str, float]) -> Floats:
    """Return the duration of each action where devices take ``slowdown`` times as long, seconds, [actions]."""
    if not slowdown:
        return step.actions.duration_s
    factors = np.array([slowdown.get(actor, 1.0) for actor in step.actors])
    return np.asarray(step.actions.duration_s * factors[step.actions.actor], np.float64)


def contended_paths(plan: Plan, scenario: Scenario) -> Paths:
    """Return the paths of a plan at declared bandwidths, each with what other flows leave it of its links."""
    return slowed_paths(plan, scenario, contention_factors(plan, scenario))


@lru_cache(maxsize=256)
def contention_factors(plan: Plan, scenario: Scenario) -> Mapping[Pair, float]:
    """Return how many times as long the transfers of each pair take as on links of its own, at declared bandwidths."""
    paths = nominal_paths(plan, scenario)
    busy_s = _busy_s(compile_step(plan, scenario), paths)
    factors: dict[Pair, float] = {**sharers(plan, scenario)}
    links = [link.name for pair in busy_s for link in scenario.cluster.path(*pair)]
    if len(set(links)) < len(links):
        step_s = step_time_s(plan, scenario, paths)
        busy_shares = {pair: min(1.0, each / step_s) for pair, each in busy_s.items()}
        factors |= {pair: _contention_factor(pair, busy_shares, scenario, paths) for pair in busy_s}
    return factors


def _contention_factor(pair: Pair, busy_shares: Mapping[Pair, float], scenario: Scenario, paths: Paths) -> float:
    """How many times as long a transfer of a pair takes as alone, among pairs that are busy for shares of the step."""
    longest = 1.0
    for link in scenario.cluster.path(*pair):
        others = [
            (1.0 if other[0] == pair[0] else share, paths(*other).rate_bps)
            for other, share in busy_shares.items()
            if other != pair and link in scenario.cluster.path(*other)
        ]
        whole_bps = payload_bps(scenario.effects.network, link.bandwidth_bps)
        # Flows that get less on other links leave the rest; no flow gets less than an equal part.
        wanted_bps = sum(share * rate_bps for share, rate_bps in others)
        equal_bps = whole_bps / (1 + sum(share for share, _ in others))
        longest = max(longest, paths(*pair).rate_bps / max(equal_bps, whole_bps - wanted_bps))
    return longest


def _busy_s(step: CompiledStep, paths: Paths) -> dict[Pair, float]:
    """How long a step's transfers between stages keep each pair of devices busy, seconds."""
    transmission_s, _ = message_times(step, paths)
    graph, between = step.graph, step.actions.kind[step.messages.receiver] != SYNC
    seconds = np.bincount(graph.channel[between], transmission_s[between], len(graph.channel_sender)).tolist()
    busy: defaultdict[Pair, float] = defaultdict(float)
    for pair, each in zip(_channel_pairs(step), seconds, strict=True):
        if each:
            busy[pair] += each
    return dict(busy)
