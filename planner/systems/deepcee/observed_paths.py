"""The paths and slow-downs that a run has shown so far, for policies that predict step times.

`ObservedPaths` keeps weighted means: for each path, of the observed time per bit and of the latency; for each device,
of the ratio of its compute time to the profile. Values of an unused path return gradually to the declared ones.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from planner.adapt.policy import Observation, PathObservation
from planner.cost.link_sharing import sharers
from planner.cost.network import ConstantRatePath, nominal_path, payload_bps
from planner.scenario.cluster import Cluster, Link
from planner.scenario.scenario import Scenario
from planner.step.compile import planned_compute_s

# Weight of the newest observation: the mean follows a sudden change to within 10 % in two observations.
NEWEST_WEIGHT = 0.7

# Weight of the declared figures for each step in which a path is unused. Assumed: half is forgotten in 35 steps.
FORGETTING_WEIGHT = 0.02


class ObservedPaths:
    """The observed paths and slow-downs; each run needs an object of its own."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._paths: dict[tuple[str, str], ConstantRatePath] = {}
        self._sharers: dict[tuple[str, str], int] = {}
        self._slowdown: dict[str, float] = {}

    @property
    def slowdown(self) -> Mapping[str, float]:
        """Device to the factor by which its compute takes longer than profiled."""
        return self._slowdown

    @property
    def alone(self) -> Mapping[tuple[str, str], ConstantRatePath]:
        """The observed paths, as they would be if nothing else were sent at the same time."""
        return {
            pair: replace(path, rate_bps=path.rate_bps * self._sharers.get(pair, 1))
            for pair, path in self._paths.items()
        }

    def path(self, source: str, target: str) -> ConstantRatePath:
        """Return a path as observed, or as declared."""
        return self._paths.get((source, target)) or nominal_path(self._scenario, source, target)

    def learn(self, observation: Observation) -> None:
        """Update all means with the observation of one step."""
        for seen in observation.paths:
            self._paths[seen.source, seen.target] = self._joined(seen)
        used = {(seen.source, seen.target) for seen in observation.paths}
        for pair in self._paths.keys() - used:
            self._paths[pair] = self._forgotten(pair)
        self._sharers.update(sharers(observation.plan, self._scenario))
        planned = planned_compute_s(observation.plan, self._scenario)
        for device, compute_s in observation.compute_s:
            # The partners of a tensor-parallel group are as fast as the device that leads them.
            planned_s = planned.get(device, 0.0)
            if planned_s > 0:
                before_ratio = self._slowdown.get(device, compute_s / planned_s)
                self._slowdown[device] = _mean(NEWEST_WEIGHT, compute_s / planned_s, before_ratio)

    def _joined(self, seen: PathObservation) -> ConstantRatePath:
        before = self.path(seen.source, seen.target)
        # Seconds per bit are averaged, not bits per second, since times add up.
        seconds_per_bit = _mean(NEWEST_WEIGHT, 1 / seen.rate_bps, 1 / before.rate_bps)
        latency_s, jitter_s = before.latency_s, before.jitter_s
        if seen.latency_s is not None:
            # The observed latency includes the jitter.
            latency_s, jitter_s = _mean(NEWEST_WEIGHT, max(0.0, seen.latency_s), latency_s + jitter_s), 0.0
        return ConstantRatePath(1 / seconds_per_bit, latency_s, jitter_s=jitter_s)

    def _forgotten(self, pair: tuple[str, str]) -> ConstantRatePath:
        seen, declared = self._paths[pair], nominal_path(self._scenario, *pair)
        seconds_per_bit = _mean(FORGETTING_WEIGHT, self._sharers.get(pair, 1) / declared.rate_bps, 1 / seen.rate_bps)
        # Where a latency was seen, it has the jitter in it.
        declared_s = declared.latency_s + declared.jitter_s - seen.jitter_s
        latency_s = _mean(FORGETTING_WEIGHT, declared_s, seen.latency_s)
        return replace(seen, rate_bps=1 / seconds_per_bit, latency_s=latency_s)


def _mean(weight: float, newest: float, before: float) -> float:
    return weight * newest + (1 - weight) * before


def with_observed_links(scenario: Scenario, paths: Mapping[tuple[str, str], ConstantRatePath]) -> Scenario:
    """Return the scenario with constant links, at the rates and latencies of the observed paths.

    The rate of a path counts for its narrowest link, and for every link of it that is declared slower. Its latency is
    divided over its links in proportion to their declared ones, or counts for the narrowest if these are zero. Where
    several paths share a link, the highest rate and the lowest latency count: the others had to wait elsewhere.

    Args:
        scenario: Scenario with the declared links.
        paths: (source, target) device to the path as it would be with nothing else on it.
    """
    rates_bps: defaultdict[str, list[float]] = defaultdict(list)
    latencies_s: defaultdict[str, list[float]] = defaultdict(list)
    for pair, seen in paths.items():
        links = scenario.cluster.path(*pair)
        if not links:
            continue
        rate_bps = seen.rate_bps / payload_bps(scenario.effects.network, 1.0)
        narrowest = min(links, key=lambda link: link.bandwidth_bps)
        declared_s = sum(link.latency_s for link in links)
        for link in links:
            if link is narrowest or link.bandwidth_bps < rate_bps:
                rates_bps[link.name].append(rate_bps)
            if declared_s > 0:
                latencies_s[link.name].append(seen.latency_s * link.latency_s / declared_s)
            elif link is narrowest:
                latencies_s[link.name].append(seen.latency_s)
    observed = rates_bps.keys() | latencies_s.keys()
    links = tuple(
        _constant(link, rates_bps[link.name], latencies_s[link.name]) if link.name in observed else link
        for link in scenario.cluster.links
    )
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))


def _constant(link: Link, rates_bps: list[float], latencies_s: list[float]) -> Link:
    return replace(
        link,
        bandwidth_bps=max(rates_bps, default=link.bandwidth_bps),
        latency_s=min(latencies_s, default=link.latency_s),
        trace=None,
    )
