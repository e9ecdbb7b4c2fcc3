"""How long transfers take that start together, outside of a step, by the model of shared links of steps."""

from collections.abc import Mapping, Sequence

import numpy as np

from planner.cost.link_sharing import Pair
from planner.cost.network import nominal_path
from planner.scenario.scenario import Scenario
from planner.step.graph import StepGraph
from planner.step.shared_links.choices import no_choices
from planner.step.shared_links.flow_state import Flows
from planner.step.shared_links.flows import carry_out
from planner.step.shared_links.step_time import ceilings_bps, network_of


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
    network = network_of(lines, pairs, scenario, connections, grows=True)
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
    ceiling_bps = ceilings_bps(bits, transmission_s, line, lines, network)
    flows = Flows(transmission_s, bits, ceiling_bps, latency_s, never, line, at_once, at_once)
    time_s, _ = carry_out(graph, network, np.zeros(actors), flows, no_choices(actors, actors, count))
    return float(time_s)
