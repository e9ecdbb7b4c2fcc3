"""What flows that share links make of them: how much longer transfers take than on links of their own.

What one device sends to several others leaves at the same moment: it shares a link for sure. Other flows meet now and
then, as activations that go forward while gradients come back over the same LAN. Taken as independent, a flow meets
another one for the part of the step for which that one is busy. Whenever flows meet, a link gives each its fair share.
Sums of gradients meet those of the same round of their ring (`planner.cost.link_sharing`). An estimate: a simulation is
exact.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.cost.link_sharing import Pair, sharers, slowed_paths
from planner.cost.network import Paths, payload_bps
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.compile import CompiledStep, compile_step
from planner.step.evaluate import message_times, nominal_paths, step_time_s
from planner.step.tables import SYNC


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
