"""Step times of plans at constant rates, in compiled code, for searches over many candidate plans.

Each ordered pair of devices is a channel that carries one message at a time. On constant links that no two channels
share, the times equal those of the simulator (tests/planner/step/test_evaluate.py).

If channels share links, `contention_factors` estimates how much longer transfers take; only the simulator is exact:

- Flows from one device to several others start together and share the link all the time.
- Other flows, such as activations forward and gradients back over one LAN, are taken as independent: a flow shares the
  link with a second flow for the share of the step in which the second flow is busy.
- Flows at the same time get equal rates.
- Sums of gradients share links with the messages of the same round of their ring (`planner.cost.link_sharing`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from planner.cost.link_sharing import Pair, sharers
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
    """Return the makespan of one step of a plan that passes `planner.check`, seconds.

    ``path`` returns the path between two devices; None for paths at declared bandwidths and latencies. ``slowdown`` is
    the factor on a device's profiled compute times, by device; 1 for devices that are not in the mapping.

    Raises:
        InputError: The order of actions deadlocks.
    """
    step = compile_step(plan, scenario)
    times = message_times(step, path or nominal_paths(plan, scenario))
    return makespan_s(step, plan, scenario, slowed_durations_s(step, slowdown or {}), *times)


def makespan_s(
    step: CompiledStep, plan: Plan, scenario: Scenario, duration_s: Floats, transmission_s: Floats, latency_s: Floats
) -> float:
    """Return the makespan of a step with given durations of actions and messages, seconds.

    Actions take ``duration_s``, [actions]. Messages keep their path busy for ``transmission_s`` and arrive
    ``latency_s`` after their departure, both [messages].

    Raises:
        InputError: The order of actions deadlocks.
    """
    sequence, acting, position = walk(step.graph)
    if len(sequence) < step.graph.actions:
        actor = int(np.flatnonzero(position < step.graph.first_action[1:])[0])
        problem = f"the order of actions deadlocks: device '{step.actors[actor]}' waits for ever"
        raise InputError(problem, valid="put each action after the actions whose results it needs")
    of_messages = (blocking_messages(step, plan, scenario), step.messages.copy_out_s, step.messages.copy_in_s)
    return float(longest_path(step.graph, sequence, acting, duration_s, transmission_s, latency_s, *of_messages))


def step_times_s(plan: Plan, scenario: Scenario, networks: Sequence[Paths]) -> Floats:
    """Return the makespan of one step on each of several networks, seconds, [networks].

    The step is compiled once: robust planning evaluates a plan in many windows of the links' traces.
    """
    step = compile_step(plan, scenario)
    sequence, acting, _ = walk(step.graph)
    times = [message_times(step, path) for path in networks]
    transmission_s, latency_s = (np.array(each) for each in zip(*times, strict=True))
    duration_s = np.tile(step.actions.duration_s, (len(networks), 1))
    of_messages = (blocking_messages(step, plan, scenario), step.messages.copy_out_s, step.messages.copy_in_s)
    return np.asarray(longest_paths(step.graph, sequence, acting, duration_s, transmission_s, latency_s, *of_messages))


def nominal_paths(plan: Plan, scenario: Scenario) -> Paths:
    """Return the paths between a plan's devices at declared bandwidths, with the plan's number of connections."""
    return lambda source, target: nominal_path(scenario, source, target, plan.connections)


def message_times(step: CompiledStep, path: Paths) -> tuple[Floats, Floats]:
    """Return each message's transmission time and its latency including jitter, both in seconds and [messages]."""
    graph, paths = step.graph, _channel_paths(step, path)
    if not paths:
        return np.empty(0), np.empty(0)
    latency_s = np.array([each.latency_s for each in paths])[graph.channel] + _jitter_delays_s(step, paths)
    transmission_s = 8 * step.messages.size_bytes / np.array([each.rate_bps for each in paths])[graph.channel]
    for channel in (number for number, each in enumerate(paths) if each.curves):
        own = graph.channel == channel
        messages = np.stack((step.messages.size_bytes[own], step.messages.flows[own]))
        alike, which = np.unique(messages, axis=1, return_inverse=True)
        times_s = [paths[channel].transmission_s(*each) for each in alike.T.tolist()]
        transmission_s[own] = np.array(times_s)[which.reshape(-1)]
    return transmission_s, latency_s


def jitter_delays_s(step: CompiledStep, path: Paths) -> Floats:
    """Return the mean delay of each message by packet jitter, seconds, [messages]."""
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
    """Return the (sending, receiving) devices of each channel."""
    channels = zip(step.graph.channel_sender.tolist(), step.graph.channel_receiver.tolist(), strict=True)
    return [(step.actors[sender], step.actors[receiver]) for sender, receiver in channels]


def _channel_paths(step: CompiledStep, path: Paths) -> list[ConstantRatePath]:
    return [path(*pair) for pair in _channel_pairs(step)]


def blocking_messages(step: CompiledStep, plan: Plan, scenario: Scenario) -> Flags:
    """Return which messages keep sender and receiver from computing (`ComputeEffects.transfers_block`), [messages].

    Devices that choose their actions do others meanwhile.
    """
    if not scenario.effects.compute.transfers_block or plan.order == "dynamic":
        return np.zeros(step.graph.messages, np.bool_)
    return np.asarray(step.actions.kind[step.messages.receiver] != SYNC, np.bool_)


def slowed_durations_s(step: CompiledStep, slowdown: Mapping[str, float]) -> Floats:
    """Return the profiled duration of each action times its device's ``slowdown`` (default 1), seconds, [actions]."""
    if not slowdown:
        return step.actions.duration_s
    factors = np.array([slowdown.get(actor, 1.0) for actor in step.actors])
    return np.asarray(step.actions.duration_s * factors[step.actions.actor], np.float64)


@lru_cache(maxsize=256)
def contention_factors(plan: Plan, scenario: Scenario) -> Mapping[Pair, float]:
    """Return the estimated factor by which other flows lengthen the transfers of each pair of devices.

    All links have their declared bandwidths.
    """
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
    """Return the factor for one pair; each other pair is busy for its entry of ``busy_shares``, a share of the step."""
    longest = 1.0
    for link in scenario.cluster.path(*pair):
        others = [
            (1.0 if other[0] == pair[0] else share, paths(*other).rate_bps)
            for other, share in busy_shares.items()
            if other != pair and link in scenario.cluster.path(*other)
        ]
        whole_bps = payload_bps(scenario.effects.network, link.bandwidth_bps)
        # Flows that are slower because of other links leave rate unused; every flow gets at least an equal part.
        wanted_bps = sum(share * rate_bps for share, rate_bps in others)
        equal_bps = whole_bps / (1 + sum(share for share, _ in others))
        longest = max(longest, paths(*pair).rate_bps / max(equal_bps, whole_bps - wanted_bps))
    return longest


def _busy_s(step: CompiledStep, paths: Paths) -> dict[Pair, float]:
    """Return the seconds for which transfers between stages keep each pair of devices busy in a step."""
    transmission_s, _ = message_times(step, paths)
    graph, between = step.graph, step.actions.kind[step.messages.receiver] != SYNC
    seconds = np.bincount(graph.channel[between], transmission_s[between], len(graph.channel_sender)).tolist()
    busy: defaultdict[Pair, float] = defaultdict(float)
    for pair, each in zip(_channel_pairs(step), seconds, strict=True):
        if each:
            busy[pair] += each
    return dict(busy)
