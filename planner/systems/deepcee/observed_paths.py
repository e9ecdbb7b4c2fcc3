"""Weighted means of the path rates, path latencies and compute slow-downs that a policy observes during a run.

`ObservedPaths` keeps, for each path, the mean time per bit and the mean latency and, for each device, the mean ratio of
its compute time to the profile. What the scenario declares counts for paths that were never used only; the means of a
path that is no longer used gradually return to it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from planner.adapt.observation import Observation, PathObservation, on_grid
from planner.cost.link_sharing import sharers
from planner.cost.network import ConstantRatePath, nominal_path, payload_bps
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.step.compile import planned_compute_s

# Weight of the newest observation: two observations after a sudden change, the mean is within 10 % of the new value.
NEWEST_WEIGHT = 0.7

# Weight of the declared values in each step in which a path is unused. Assumption: a deviation halves in 35 steps.
FORGETTING_WEIGHT = 0.02


class ObservedPaths:
    """The observed paths and slow-downs of one run; each run needs an object of its own.

    Attributes:
        slowdown: Name of a device to the ratio of its compute time to the profiled time.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._paths: dict[tuple[str, str], ConstantRatePath] = {}
        self._sharers: dict[tuple[str, str], int] = {}
        self.slowdown: dict[str, float] = {}

    @property
    def alone(self) -> Mapping[tuple[str, str], ConstantRatePath]:
        """Observed paths by (source, target), each with the rate that its flow would have without other flows."""
        return {
            pair: replace(path, rate_bps=path.rate_bps * self._sharers.get(pair, 1))
            for pair, path in self._paths.items()
        }

    def path(self, source: str, target: str) -> ConstantRatePath:
        """Return the path between two devices as observed so far, or as declared if it was never used."""
        return self._paths.get((source, target)) or nominal_path(self._scenario, source, target)

    def learn(self, observation: Observation) -> None:
        """Update all means with the observation of one complete step."""
        for seen in observation.paths:
            self._paths[seen.source, seen.target] = self._joined(seen)
        used = {(seen.source, seen.target) for seen in observation.paths}
        for pair in self._paths.keys() - used:
            self._paths[pair] = self._forgotten(pair)
        self._sharers.update(sharers(observation.plan, self._scenario))
        learn_slowdowns(self.slowdown, observation, self._scenario)

    def _joined(self, seen: PathObservation) -> ConstantRatePath:
        """Return the means with a path's newest observation; the first one replaces what the scenario declares."""
        pair = (seen.source, seen.target)
        before = self.path(*pair)
        weight = NEWEST_WEIGHT if pair in self._paths else 1.0
        # Seconds per bit are averaged, not bits per second, since times add up.
        seconds_per_bit = _mean(weight, 1 / seen.rate_bps, 1 / before.rate_bps)
        latency_s, jitter_s = before.latency_s, before.jitter_s
        if seen.latency_s is not None:
            # The observed latency includes the jitter.
            latency_s, jitter_s = _mean(weight, max(0.0, seen.latency_s), latency_s + jitter_s), 0.0
        return ConstantRatePath(1 / seconds_per_bit, latency_s, jitter_s=jitter_s)

    def _forgotten(self, pair: tuple[str, str]) -> ConstantRatePath:
        seen, declared = self._paths[pair], nominal_path(self._scenario, *pair)
        seconds_per_bit = _mean(FORGETTING_WEIGHT, self._sharers.get(pair, 1) / declared.rate_bps, 1 / seen.rate_bps)
        # An observed latency includes the jitter, and `_joined` then sets the path's jitter to 0.
        declared_s = declared.latency_s + declared.jitter_s - seen.jitter_s
        latency_s = _mean(FORGETTING_WEIGHT, declared_s, seen.latency_s)
        return replace(seen, rate_bps=1 / seconds_per_bit, latency_s=latency_s)


def learn_slowdowns(slowdown: dict[str, float], observation: Observation, scenario: Scenario) -> None:
    """Update ``slowdown``, device to mean ratio of compute time to profiled time, with the observed step."""
    planned = planned_compute_s(observation.plan, scenario)
    for device, compute_s in observation.compute_s:
        # Partners in a tensor-parallel group have no planned time of their own.
        if planned.get(device, 0.0) > 0 and compute_s > 0:
            ratio = compute_s / planned[device]
            slowdown[device] = _mean(NEWEST_WEIGHT, ratio, slowdown.get(device, ratio))


def _mean(weight: float, newest: float, before: float) -> float:
    return weight * newest + (1 - weight) * before


def with_observed_links(scenario: Scenario, paths: Mapping[tuple[str, str], ConstantRatePath]) -> Scenario:
    """Return the scenario with links of constant rate and latency, derived from observed paths.

    - The rate of a path is assigned to its link with the least declared bandwidth, and to every link of the path whose
      declared bandwidth is below this rate.
    - The latency of a path is divided among its links in proportion to their declared latencies. If these are all zero,
      the link with the least bandwidth gets the whole latency.
    - A link on several paths gets the highest rate and the lowest latency, since slower paths are limited elsewhere.
    - Links on no observed path stay as declared.

    Args:
        scenario: Scenario with the declared links.
        paths: (source, target) to the path with the rate and latency that one flow alone would have.
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
        # The scenario adds the hand-over of a message, which the observed latency includes.
        seen_s = max(0.0, seen.latency_s - scenario.effects.network.handover_s)
        for link in links:
            if link is narrowest or link.bandwidth_bps < rate_bps:
                rates_bps[link.name].append(rate_bps)
            if declared_s > 0:
                latencies_s[link.name].append(seen_s * link.latency_s / declared_s)
            elif link is narrowest:
                latencies_s[link.name].append(seen_s)
    observed = rates_bps.keys() | latencies_s.keys()
    links = tuple(
        replace(
            link,
            bandwidth_bps=max(rates_bps[link.name], default=link.bandwidth_bps),
            latency_s=min(latencies_s[link.name], default=link.latency_s),
            trace=None,
        )
        if link.name in observed
        else link
        for link in scenario.cluster.links
    )
    return replace(scenario, cluster=Cluster(scenario.cluster.devices, links))


def with_links_on_grid(observed: Scenario, declared: Scenario) -> Scenario:
    """Return the scenario ``observed`` with rates and latencies of its links rounded by `on_grid`, for a search."""
    links = []
    for link, before in zip(observed.cluster.links, declared.cluster.links, strict=True):
        rate_bps, latency_s = (
            on_grid(link.bandwidth_bps, before.bandwidth_bps),
            on_grid(link.latency_s, before.latency_s),
        )
        links.append(replace(link, bandwidth_bps=rate_bps, latency_s=latency_s))
    return replace(observed, cluster=Cluster(observed.cluster.devices, tuple(links)))
