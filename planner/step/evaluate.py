"""How long one step of a plan takes on steady links: the quick judge of candidate plans, in compiled code.

Each ordered device pair is a channel of its own that carries one transfer at a time. On constant links that no
two channels share, this is exactly what the simulator's events give; a test holds the two together.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from planner.cost.network import ConstantRatePath, Paths, jitter_delay_s, nominal_path
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
