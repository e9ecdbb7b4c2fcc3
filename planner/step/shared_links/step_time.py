"""Step times of plans whose messages share links, by the simulator's model of links at constant rates.

Without the effects of TCP and without copies between GPU and host, times equal those of the simulator
(tests/planner/step/test_shared_links.py), but where rounding errors decide which action an actor chooses. With
`NetworkEffects.cold_start`, windows that close on idle connections grow and halve as in the simulator; others are taken
to be as large as they get, and to open at a constant rate. In the simulator, acknowledgements also wait behind the
bytes of the other direction of a link.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from planner.cost.link_sharing import Pair, binding_links
from planner.cost.network import nominal_path, payload_bps
from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario
from planner.step.compile import CompiledStep, compile_step
from planner.step.evaluate import blocking_messages, makespan_s, message_times, nominal_paths
from planner.step.graph import Flags, Floats, Ints, StepGraph, repeated
from planner.step.shared_links.choices import choices_of, no_choices
from planner.step.shared_links.flow_state import Flows, Network
from planner.step.shared_links.flows import carry_out


def shared_step_time_s(plan: Plan, scenario: Scenario) -> float:
    """Return the makespan of one step of a plan at declared rates, with messages that share links, seconds.

    The plan passes `planner.check`.

    Raises:
        InputError: The order of actions deadlocks.
    """
    return _carried_out_s(plan, scenario, 1)[0]


def steady_step_time_s(plan: Plan, scenario: Scenario) -> float:
    """Return the time of a step of a plan in the midst of a run, seconds; arguments are those of `shared_step_time_s`.

    Devices that have finished a step begin the next one while others still compute, so that a step may be shorter than
    its makespan.

    Raises:
        InputError: The order of actions deadlocks.
    """
    ends_s = _carried_out_s(plan, scenario, 1 + _FURTHER_STEPS)
    # Fewer digits of a difference are exact: steps that are equally long come out as equal.
    return float(f"{(ends_s[-1] - ends_s[0]) / _FURTHER_STEPS:.12g}")


# Steps behind the first one over which `steady_step_time_s` takes the mean.
_FURTHER_STEPS = 2


def _carried_out_s(plan: Plan, scenario: Scenario, count: int) -> list[float]:
    """Return when each of several steps in a row is over, seconds; of a single one with its last transfers."""
    step = compile_step(plan, scenario)
    times = message_times(step, nominal_paths(plan, scenario))
    lines = _lines(step, scenario)
    # Windows that never close are open after the first steps.
    grows = scenario.effects.network.idle_s < math.inf
    network = _network(lines, _pairs(step), scenario, plan.connections, grows=grows)
    if count > 1 or not network.alone.all():
        flows = _flows(step, plan, scenario, lines, network, *times)
        graph, action, message, number = repeated(step.graph, count)
        choices = choices_of(step, plan, scenario, action, message, number)
        of_steps = Flows(
            flows.transmission_s[message],
            flows.bits[message],
            flows.ceiling_bps[message],
            flows.latency_s[message],
            flows.blocking[message],
            flows.sender[message],
            flows.copy_out_s[message],
            flows.copy_in_s[message],
        )
        makespan, ended_s = carry_out(graph, network, step.actions.duration_s[action], of_steps, choices)
        if makespan < np.inf:
            return [float(ended_s[number == each].max()) for each in range(count)] if count > 1 else [float(makespan)]
        assert plan.order != "dynamic", "actors that choose wait for ever"
    # No links are shared, or the order deadlocks, which the error says.
    return [makespan_s(step, plan, scenario, step.actions.duration_s, *times)] * count


# The links of each line, by its sending and receiving device.
_Lines = dict[Pair, tuple[Link, ...]]


def _pairs(step: CompiledStep) -> list[Pair]:
    """Return the sending and the receiving device of each channel."""
    channels = zip(step.graph.channel_sender.tolist(), step.graph.channel_receiver.tolist(), strict=True)
    return [(step.actors[sender], step.actors[receiver]) for sender, receiver in channels]


def _lines(step: CompiledStep, scenario: Scenario) -> _Lines:
    # The communication streams of two devices send over the same line as the devices themselves.
    return {pair: scenario.cluster.path(*pair) for pair in _pairs(step)}


def _network(lines: _Lines, channels: Sequence[Pair], scenario: Scenario, connections: int, *, grows: bool) -> Network:
    """Return the lines of pairs of devices, and the links that they share.

    Args:
        lines: The links of each line.
        channels: The pair of each channel.
        scenario: Cluster and effects.
        connections: Number of TCP connections between two regions.
        grows: Whether windows of TCP grow from their initial size; otherwise they are as large as they get.
    """
    effects, cluster = scenario.effects.network, scenario.cluster
    number = {pair: line for line, pair in enumerate(lines)}
    links = {link.name: link for path in lines.values() for link in path}
    rates_bps = {name: payload_bps(effects, link.bandwidth_bps) for name, link in links.items()}
    bound = binding_links(
        [[link.name for link in path] for path in lines.values()],
        rates_bps,
        rates_bps,
        [math.inf] * len(lines),
        [name for name, link in links.items() if link.size_curve is not None],
    )
    users = Counter(name for each in bound for name in each)
    shared = {name: index for index, name in enumerate(name for name, count in users.items() if count > 1)}
    own = [[shared[name] for name in each if name in shared] for each in bound]
    weight = [connections if cluster.crosses_regions(*pair) else 1 for pair in lines]
    grows = grows and effects.cold_start
    queued = np.full(len(lines), effects.cold_start)
    if effects.cold_start and any(link.loss for link in links.values()):
        queued = ~_beside_losses(lines, bound)
    window_bits, path_bps = np.full(len(lines), np.inf), np.full(len(lines), np.inf)
    round_trip_s = np.zeros(len(lines))
    for line, (pair, path) in enumerate(lines.items() if effects.cold_start else ()):
        round_trip_s[line] = sum(link.latency_s for link in (*path, *cluster.path(*pair[::-1])))
        path_bps[line] = min((rates_bps[link.name] for link in path), default=math.inf)
        # The rate of a path that loses packets is the one that windows allow in the long run.
        if round_trip_s[line] > 0 and not any(link.loss for link in path):
            window_bits[line] = 8 * effects.window_bytes * weight[line]
    return Network(
        np.array([number[pair] for pair in channels], np.int64),
        np.array(
            [
                not path or not (queues or each or grows)
                for path, each, queues in zip(lines.values(), own, queued.tolist(), strict=True)
            ],
            np.bool_,
        ),
        np.array(weight, np.int64),
        np.concatenate(([0], np.cumsum([len(each) for each in own]))).astype(np.int64),
        np.array([link for each in own for link in each], np.int64),
        np.array([rates_bps[name] for name in shared], np.float64),
        queued,
        window_bits,
        grows,
        path_bps,
        round_trip_s,
        np.minimum(8 * effects.initial_window_bytes * np.array(weight), window_bits),
        effects.idle_s,
    )


def _beside_losses(lines: _Lines, bound: Sequence[Sequence[str]]) -> Flags:
    """Return which lines lose packets or share links with such lines, directly or by way of others, [lines].

    As in the simulator, packet losses keep windows small, so that no queues arise.
    """
    beside = [any(link.loss for link in path) for path in lines.values()]
    while True:
        names = {name for each, loses in zip(bound, beside, strict=True) if loses for name in each}
        wider = [loses or not names.isdisjoint(each) for each, loses in zip(bound, beside, strict=True)]
        if wider == beside:
            return np.array(beside, np.bool_)
        beside = wider


def _flows(
    step: CompiledStep,
    plan: Plan,
    scenario: Scenario,
    lines: _Lines,
    network: Network,
    transmission_s: Floats,
    latency_s: Floats,
) -> Flows:
    bits = (8.0 * step.messages.size_bytes).astype(np.float64)
    ceiling_bps = _ceilings_bps(bits, transmission_s, network.line[step.graph.channel], lines, network)
    sender = step.actions.actor[step.messages.sender]
    return Flows(
        transmission_s,
        bits,
        ceiling_bps,
        latency_s,
        blocking_messages(step, plan, scenario),
        sender,
        step.messages.copy_out_s,
        step.messages.copy_in_s,
    )


def _ceilings_bps(bits: Floats, transmission_s: Floats, line: Ints, lines: _Lines, network: Network) -> Floats:
    """Return the highest rate of messages on the path of their ``line``, bits per second, [messages]."""
    rates_bps = np.divide(bits, transmission_s, out=np.full(len(bits), np.inf), where=transmission_s > 0)
    if network.queued.any():
        # The window limits the rate by itself; a size curve limits it still.
        has_curve = [any(link.size_curve is not None for link in path) for path in lines.values()]
        is_free = (network.queued & ~np.array(has_curve, np.bool_) & np.isfinite(network.path_bps))[line]
        rates_bps = np.where(is_free, network.path_bps[line], rates_bps)
    return np.asarray(rates_bps, np.float64)


def transfer_time_s(sizes_bytes: Mapping[Pair, Sequence[int]], scenario: Scenario, connections: int) -> float:
    """Return the time until messages between pairs of devices have arrived, at declared rates, seconds.

    The messages of a pair leave one after the other, over connections that have sent nothing before.

    Args:
        sizes_bytes: Bytes of the messages of each pair (sending device, receiving device), in their order.
        scenario: Cluster and effects.
        connections: Number of TCP connections between two devices of different regions.
    """
    pairs = list(sizes_bytes)
    counts = [len(each) for each in sizes_bytes.values()]
    paths = [nominal_path(scenario, *pair, connections) for pair in pairs]
    messages = [(path, size) for path, sizes in zip(paths, sizes_bytes.values(), strict=True) for size in sizes]
    lines = {pair: scenario.cluster.path(*pair) for pair in pairs}
    network = _network(lines, pairs, scenario, connections, grows=True)
    line, bits = np.repeat(np.arange(len(pairs)), counts), np.array([8.0 * size for _, size in messages])
    transmission_s = np.array([path.transmission_s(size) for path, size in messages])
    latency_s = np.array([path.propagation_s(size) for path, size in messages])
    # Each pair is an actor whose only action sends its messages; the only action of a further actor awaits all.
    actors, count = len(pairs) + 1, len(messages)
    receives, sends = np.zeros(actors + 1, np.int64), np.full(actors + 1, count, np.int64)
    receives[-1], sends[0], sends[1:actors] = count, 0, np.cumsum(counts)
    graph = StepGraph(
        np.arange(actors + 1),
        receives,
        np.arange(count),
        sends,
        np.full(count, actors - 1, np.int64),
        line,
        np.arange(actors - 1),
        np.full(actors - 1, actors - 1, np.int64),
    )
    never, at_once = np.zeros(count, np.bool_), np.zeros(count)
    ceiling_bps = _ceilings_bps(bits, transmission_s, line, lines, network)
    flows = Flows(transmission_s, bits, ceiling_bps, latency_s, never, line, at_once, at_once)
    time_s, _ = carry_out(graph, network, np.zeros(actors), flows, no_choices(actors, actors, count))
    return float(time_s)
