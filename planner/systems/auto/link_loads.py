"""The load of links in a step of a plan, from the plan alone, for plans that are too large to evaluate every message.

A link is as long busy as its messages take one after the other, and no step is shorter than its busiest link. Transfers
between stages of all pipelines are under way at the same time, so that each of them gets a part of a link's rate: the
estimate is that of `planner.step.evaluate.contention_factors`, for sets of equivalent pipelines.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from planner.cost.link_sharing import Pair, boundary_samples, slowed_paths
from planner.cost.network import Paths, message_bytes, nominal_path, payload_bps
from planner.cost.synchronisation import GradientSync, gradient_syncs
from planner.plan.plan import Plan, representatives
from planner.scenario.scenario import Scenario
from planner.step.compile import compile_step
from planner.step.evaluate import makespan_s, message_times, nominal_paths

# Times that the transfers' share of the step and the step's time, which depend on each other, are computed in turn.
_ROUNDS = 2


def transferred_bytes(plan: Plan, scenario: Scenario) -> dict[Pair, int]:
    """Return the bytes of outputs and their gradients that each pair of devices transfers in a step."""
    found: defaultdict[Pair, int] = defaultdict(int)
    for pipeline in plan.pipelines:
        sizes = Counter(pipeline.microbatches)
        for left, right in pairwise(pipeline.stages):
            sample_bytes = scenario.model.layers[left.end_layer - 1].output_bytes
            for size, count in sizes.items():
                for pair, samples in boundary_samples(left, right, size).items():
                    for ends in (pair, pair[::-1]):
                        size_bytes = message_bytes(scenario, plan.compression, *ends, samples, sample_bytes)
                        found[ends] += count * size_bytes
    return dict(found)


def summed_bytes(plan: Plan, scenario: Scenario) -> dict[Pair, int]:
    """Return the bytes that each pair of devices sends in a step's sums of gradients."""
    found: defaultdict[Pair, int] = defaultdict(int)
    for sync in gradient_syncs(plan, scenario):
        for pair, size_bytes in _sent_bytes(sync):
            found[pair] += size_bytes
    return dict(found)


def _sent_bytes(sync: GradientSync) -> Iterator[tuple[Pair, int]]:
    if sync.algorithm == "ring":
        count = len(sync.devices)
        for pair in pairwise((*sync.devices, sync.devices[0])):
            yield pair, 2 * (count - 1) * sync.size_bytes // count
        return
    for device in sync.devices:
        for exchange in sync.exchanges(device):
            if exchange.send_to is not None:
                yield (device, sync.devices[exchange.send_to]), sync.sent_bytes(exchange)


def link_loads_s(sent_bytes: Mapping[Pair, int], scenario: Scenario) -> dict[str, float]:
    """Return for how long each link is busy with the bytes of some pairs of devices, seconds, by the link's name."""
    loads_s: defaultdict[str, float] = defaultdict(float)
    for pair, size_bytes in sent_bytes.items():
        for link in scenario.cluster.path(*pair):
            loads_s[link.name] += 8 * size_bytes / payload_bps(scenario.effects.network, link.bandwidth_bps)
    return dict(loads_s)


def pipelines_s(plan: Plan, scenario: Scenario) -> float:
    """Return the time of a step without gradient sums, with links that all pipelines share, seconds.

    Only one of each set of equivalent pipelines is evaluated. Where transfers block, they do so in order ``dynamic``,
    too: the search compares plans in it that it gives another order afterwards.
    """
    alone = representatives(plan, scenario)
    step, ordered = compile_step(alone, scenario), replace(alone, order="scheduled")

    def evaluated_s(path: Paths) -> float:
        return makespan_s(step, ordered, scenario, step.actions.duration_s, *message_times(step, path))

    step_s = evaluated_s(nominal_paths(alone, scenario))
    sent_bytes = transferred_bytes(plan, scenario)
    users = Counter(link.name for pair in sent_bytes for link in scenario.cluster.path(*pair))
    if not step_s or all(count == 1 for count in users.values()):
        return step_s
    paths = {pair: nominal_path(scenario, *pair, plan.connections) for pair in sent_bytes}
    busy_s = {pair: paths[pair].transmission_s(size_bytes) for pair, size_bytes in sent_bytes.items()}
    for _ in range(_ROUNDS):
        # Number of flows and rate that they want on each link, both weighted by the flows' shares of the step.
        flows: defaultdict[str, float] = defaultdict(float)
        wanted_bps: defaultdict[str, float] = defaultdict(float)
        share = {pair: min(1.0, each_s / step_s) for pair, each_s in busy_s.items()}
        for pair, own in share.items():
            for link in scenario.cluster.path(*pair):
                flows[link.name] += own
                wanted_bps[link.name] += own * paths[pair].rate_bps
        factors: dict[Pair, float] = {}
        for pair in transferred_bytes(alone, scenario):
            own, rate_bps = share[pair], paths[pair].rate_bps
            for link in scenario.cluster.path(*pair):
                whole_bps = payload_bps(scenario.effects.network, link.bandwidth_bps)
                equal_bps = whole_bps / (1 + flows[link.name] - own)
                left_bps = whole_bps - (wanted_bps[link.name] - own * rate_bps)
                factors[pair] = max(factors.get(pair, 1.0), rate_bps / max(equal_bps, left_bps))
        step_s = evaluated_s(slowed_paths(alone, scenario, factors))
    return max([step_s, *link_loads_s(sent_bytes, scenario).values()])
