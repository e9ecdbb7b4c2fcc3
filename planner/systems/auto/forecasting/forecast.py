"""Forecasts of the links, learned from the steps of a run.

Every step that uses a link gives one sample of the link's rate and latency, which is taken to last as long as the step.
Probes give the latency of a link that is not used. A regime is the time between two changes of the mean of log(rate),
which a Page-Hinkley test finds. The forecast of a link is the set of all samples of the current regime, not their mean,
since a plan must also run when the link is slow. A regime is expected to last as long as past regimes did on average.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.adapt.observation import Observation, PathObservation, joint_rate_bps
from planner.cost.network import ConstantRatePath, Paths, payload_bps
from planner.plan.plan import Plan
from planner.scenario.cluster import Link
from planner.scenario.scenario import Scenario
from planner.step.evaluate import contention_factors
from planner.systems.auto.forecasting.change_detection import PageHinkley
from planner.systems.auto.forecasting.probed_states import MEMORY_S, ProbedStates

# Assumed length of the first regime of a link, seconds, which is not known before the first change.
FIRST_DWELL_S = 600.0

# Parameters of the Page-Hinkley test on log(rate). Assumption: changes by a factor of two are worth finding, so the
# slack is half of log(2). After such a change, the threshold is reached in 20 steps; bursts of a few seconds do not
# reach it.
SLACK = math.log(2) / 2
THRESHOLD = 20 * (math.log(2) - SLACK)

# Least number of samples of a link that is probed, if it has as many rates.
_FEWEST_STATES = 12

# A link may have so many times the rate that a probe shows: hosts delay the packets of a large probe.
PROBE_ERROR = 4.0

# Least rate of a sample, bits per second, because the rate of an outage, 0, has no logarithm.
LEAST_BPS = 1e4


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Rate and latency of a link as observed in one step.

    Attributes:
        rate_bps: Payload rate while the link was busy, bits per second.
        latency_s: One-way latency, seconds.
        duration_s: Duration of the step, seconds.
    """

    rate_bps: float
    latency_s: float
    duration_s: float


class LinkForecast:
    """Samples of one link since its mean rate last changed (the current regime), and the lengths of past regimes.

    Args:
        rate_bps: Declared payload rate, bits per second.
        latency_s: Declared one-way latency, seconds.

    Attributes:
        declared: Sample with the declared rate and latency.
        age_s: Total duration of the steps of the current regime that used the link, seconds.
        unseen_s: Total duration of the steps since the last one that used the link, seconds.
    """

    def __init__(self, rate_bps: float, latency_s: float) -> None:
        self.declared = LinkSample(rate_bps, latency_s, 0.0)
        self._detector = PageHinkley(slack=SLACK, threshold=THRESHOLD)
        self._samples: deque[LinkSample] = deque()
        # Empty without probes; with them, what steps that used the link have shown, too.
        self._states = ProbedStates()
        # Time of all steps, and of those until the last probe, seconds.
        self._now_s = self._probed_s = 0.0
        # By whether their rates are the declared one: samples as probes show, until something is added.
        self._as_known: dict[bool, tuple[LinkSample, ...]] = {}
        self._dwells_s = [FIRST_DWELL_S]
        self.age_s = 0.0
        self.unseen_s = 0.0

    @property
    def expected_dwell_s(self) -> float:
        """Expected remaining time of the regime, seconds: the mean length of past ones, or its own age if longer."""
        return max(self.age_s, sum(self._dwells_s) / len(self._dwells_s))

    @property
    def is_seen(self) -> bool:
        """Whether a step of this regime has used the link."""
        return bool(self._samples)

    @property
    def samples(self) -> tuple[LinkSample, ...]:
        """Samples of this regime, oldest first; if there are none, ones with the declared rate.

        Where a link was not used, probes show latencies and too low rates: each of these comes with one of the rates.
        """
        return self._as_probed(self._samples, is_declared=False) if self._samples else self.as_declared

    @property
    def as_declared(self) -> tuple[LinkSample, ...]:
        """Samples with the declared rate, but as probes show, oldest first."""
        return self._as_probed([self.declared], is_declared=True)

    @property
    def expected(self) -> LinkSample:
        """Sample of median rate of this regime; the declared one once the regime should be over, unless it was seen."""
        samples = self.as_declared if self.unseen_s > self.expected_dwell_s else self.samples
        return sorted(samples, key=lambda each: (each.rate_bps, each.latency_s))[len(samples) // 2]

    def _as_probed(self, samples: Sequence[LinkSample], *, is_declared: bool) -> tuple[LinkSample, ...]:
        """Return the samples with the latencies that probes show, and no higher rates than these."""
        if not self._states:
            return tuple(samples)
        if is_declared not in self._as_known:
            count = max(len(self._states), min(len(samples), _FEWEST_STATES))

            def joined(place: int) -> LinkSample:
                # Both in order, and each as often as the others.
                at = (2 * place + 1) / (2 * count)
                sample, state = samples[int(at * len(samples))], self._states[int(at * len(self._states))]
                return LinkSample(min(sample.rate_bps, state.most_bps), state.latency_s, sample.duration_s)

            self._as_known[is_declared] = tuple(map(joined, range(count)))
        return self._as_known[is_declared]

    def learn(self, sample: LinkSample) -> bool:
        """Add the sample of a step that used the link; return whether it begins a new regime."""
        self._pass(sample.duration_s)
        self.unseen_s = 0.0
        self._samples.append(sample)
        if self._states:
            self._states.add(self._now_s, sample.latency_s, None)
        self.age_s += sample.duration_s
        kept_s = sum(each.duration_s for each in self._samples)
        while len(self._samples) > 1 and kept_s > MEMORY_S:
            kept_s -= self._samples.popleft().duration_s
        self._detector = self._detector.after(math.log(max(sample.rate_bps, LEAST_BPS)))
        if not self._detector.changed:
            return False
        self._dwells_s.append(self.age_s)
        self.restart()
        self._samples.append(sample)
        self._states.clear()
        return True

    def see(self, latency_s: float, most_bps: float) -> None:
        """Add what a probe has shown: latency, and highest likely rate, bits per second."""
        self._probed_s = self._now_s
        self._states.add(self._now_s, latency_s, most_bps)
        self._as_known.clear()

    def _pass(self, duration_s: float) -> None:
        self._now_s += duration_s
        self._states.forget(self._now_s)
        if self._now_s > self._probed_s + MEMORY_S:
            self._states.clear()
        self._as_known.clear()

    def skip(self, duration_s: float) -> None:
        """Add the duration of a step that did not use the link, seconds."""
        self._pass(duration_s)
        self.unseen_s += duration_s

    def restart(self) -> None:
        """Begin a new regime without samples of the rate, without recording the length of the old one."""
        self._detector = PageHinkley(slack=SLACK, threshold=THRESHOLD)
        self._samples.clear()
        self._as_known.clear()
        self.age_s = 0.0


def observed_links(observation: Observation, scenario: Scenario) -> dict[str, tuple[float, float | None]]:
    """Return name, rate (bits per second) and latency (seconds) of each link that a step used.

    - Links inside a region or host are left out.
    - The rate of a link is the highest of the rates of the paths that use it, and of the rate of all of them together:
      no rate that the scenario declares is used.
    - The latency of a link is as in `_latencies_s`, and None if no path has one.
    """
    users: defaultdict[str, list[PathObservation]] = defaultdict(list)
    for path in observation.paths:
        for link in _links(path.source, path.target, scenario):
            users[link.name].append(path)
    delays = ((path.source, path.target, path.latency_s) for path in observation.paths if path.latency_s is not None)
    latencies_s = _latencies_s(delays, scenario)
    return {
        name: (max(joint_rate_bps(paths), *(path.rate_bps for path in paths)), latencies_s.get(name))
        for name, paths in users.items()
    }


def probed_links(observation: Observation, scenario: Scenario) -> dict[str, tuple[float, float]]:
    """Return latency, seconds, and highest likely rate, bits per second, of each link that a step probed, by name.

    Of several paths over a link the one with the highest rate counts, which other links limit least. Messages take as
    much longer than probes as their hand-over.
    """
    handover_s = scenario.effects.network.handover_s
    delays = ((path.source, path.target, path.latency_s + handover_s) for path in observation.unused)
    rates_bps: dict[str, float] = {}
    for path in observation.unused:
        rate_bps = math.inf if path.rate_bps is None else PROBE_ERROR * path.rate_bps
        for link in _links(path.source, path.target, scenario):
            rates_bps[link.name] = max(rate_bps, rates_bps.get(link.name, 0.0))
    return {name: (latency_s, rates_bps[name]) for name, latency_s in _latencies_s(delays, scenario).items()}


def _latencies_s(delays: Iterable[tuple[str, str, float]], scenario: Scenario) -> dict[str, float]:
    """Return the latencies of links, seconds, by name, from the delays (source, target, seconds) of paths.

    The delay of a path is divided among its links in proportion to their declared latencies; of several paths on a
    link, the lowest latency counts.
    """
    found: dict[str, float] = {}
    for source, target, delay_s in delays:
        links = _links(source, target, scenario)
        declared_s = sum(link.latency_s for link in links)
        for link in links:
            part = link.latency_s / declared_s if declared_s else 1 / len(links)
            latency_s = max(0.0, delay_s * part)
            found[link.name] = min(latency_s, found.get(link.name, latency_s))
    return found


def _links(source: str, target: str, scenario: Scenario) -> list[Link]:
    """Return the links of a path but those inside a region or host."""
    return [link for link in scenario.cluster.path(source, target) if link.source != link.target]


def forecast_paths(plan: Plan, scenario: Scenario, states: Mapping[str, LinkSample]) -> Paths:
    """Return the paths between a plan's devices if the links have the rates and latencies of ``states``.

    ``states`` maps the name of a link to a sample; other links are those of ``scenario``, at whose rates the sharing of
    links is estimated too.
    """
    factors = contention_factors(plan, scenario)

    def path(source: str, target: str) -> ConstantRatePath:
        links = scenario.cluster.path(source, target)
        seen = [(states.get(link.name), link) for link in links]
        network = scenario.effects.network
        rates_bps = [state.rate_bps if state else payload_bps(network, link.bandwidth_bps) for state, link in seen]
        latency_s = sum(state.latency_s if state else link.latency_s for state, link in seen)
        jitter_s = sum(link.jitter_s for state, link in seen if state is None)
        rate_bps = max(min(rates_bps, default=math.inf), LEAST_BPS) / factors.get((source, target), 1.0)
        # Sampled rates are those that messages reached: they already include the effect of the link's size curve.
        curves = tuple(link.size_curve for state, link in seen if state is None and link.size_curve is not None)
        return ConstantRatePath(rate_bps, latency_s, curves, network.share, jitter_s)

    return path
