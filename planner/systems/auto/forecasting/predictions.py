"""Predicted step times of plans on links as a run has observed them.

Every step adds a sample to the forecast of each link that it used, and its time corrects later predictions.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

from planner.adapt.observation import Observation
from planner.check.paths import between_stages
from planner.cost.network import payload_bps
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_times_s
from planner.step.graph import Floats
from planner.systems.auto.forecasting.forecast import (
    LEAST_BPS,
    LinkForecast,
    LinkSample,
    forecast_paths,
    observed_links,
    probed_links,
)
from planner.systems.auto.forecasting.link_rates import Links, are_near, declared_links, with_links
from planner.systems.auto.forecasting.prediction_error import PredictionBias

# Number of network states (one sample of every link) over which the predicted step time of a plan is averaged.
STATES = 12

# Probability with which the next step takes a time within the interval that is forecast, and quantiles of the standard
# normal distribution in the midst of nine equal parts of it: errors of a prediction, in standard deviations.
PROBABILITY = 0.8
_ERRORS = np.array([NormalDist().inv_cdf((2 * part + 1) / 18) for part in range(9)])

# Shares of its mean rate with which a link counts as slow, or as collapsed; plans for such links are kept in reserve.
SLOW = 1 / 2
COLLAPSED = 1 / 32

# Share of its declared or last known rate that a link is assumed to have at least while it is not seen.
UNSEEN = 1 / 8

# Seconds without use after which a link's samples are stale.
FRESH_S = 60.0


class Predictions:
    """The forecasts of one run.

    Attributes:
        bias: Error of predicted step times so far.
        links: Forecast of each link, but those inside a region or host, by its name.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        # The scenario with links about as observed: flows share them as their rates let them. It changes seldom, since
        # the estimates of sharing are kept by scenario.
        self._believed = scenario
        self._believed_links: Links = {}
        self.bias = PredictionBias()
        self.links = {
            name: LinkForecast(payload_bps(scenario.effects.network, rate_bps), latency_s)
            for name, (rate_bps, latency_s) in declared_links(scenario).items()
        }

    def learn(self, observation: Observation, duration_s: float) -> tuple[dict[str, LinkSample], bool]:
        """Add a step, which took ``duration_s``, to the forecasts of the links.

        Of links that it did not use, probes may have shown the latency, and that their rate is low.

        Returns:
            The samples of the links that the step used, and whether a new regime of one of them begins.
        """
        seen = observed_links(observation, self._scenario)
        probed = probed_links(observation, self._scenario)
        changed, samples = False, {}
        for name, link in self.links.items():
            if name in seen:
                rate_bps, latency_s = seen[name]
                if link.unseen_s > FRESH_S:
                    link.restart()
                known_s = link.samples[-1].latency_s if latency_s is None else latency_s
                samples[name] = LinkSample(rate_bps, known_s, duration_s)
                changed |= link.learn(samples[name])
            else:
                link.skip(duration_s)
                if name in probed:
                    link.see(*probed[name])
        return samples, changed

    def correct(self, plan: Plan, duration_s: float, samples: Mapping[str, LinkSample]) -> None:
        """Learn the error of predictions from a step, which took ``duration_s`` on links as in ``samples``."""
        paths = forecast_paths(plan, self._believed, samples)
        self.bias.learn(plan, duration_s, float(step_times_s(plan, self._scenario, [paths])[0]))

    def believe(self) -> None:
        """Let flows share links about as their observed rates let them, from now on."""
        links = self._observed_links()
        if not (self._believed_links and are_near(links, self._believed_links)):
            self._believed, self._believed_links = with_links(self._scenario, links), links

    def step_s(self, plan: Plan) -> float:
        """Return the predicted time of a step, seconds."""
        return self._at_states_s(plan, self._samples())

    def _samples(self) -> dict[str, tuple[LinkSample, ...]]:
        return {name: link.samples for name, link in self.links.items()}

    def optimistic_s(self, plan: Plan) -> float:
        """Return the predicted time of a step if links with stale samples are as declared or probed, seconds."""
        links = self.links.items()
        samples = {name: link.samples if _is_fresh(link) else link.as_declared for name, link in links}
        return self._at_states_s(plan, samples)

    def expected_s(self, plan: Plan, known: Mapping[str, LinkSample]) -> float:
        """Return the predicted time of a step on links as in ``known``, others as they are expected to be, seconds."""
        links = {name: known.get(name, link.expected) for name, link in self.links.items()}
        paths = forecast_paths(plan, self._believed, links)
        return self.bias.factor(plan) * float(step_times_s(plan, self._scenario, [paths])[0])

    def _at_states_s(self, plan: Plan, samples: Mapping[str, Sequence[LinkSample]]) -> float:
        """Return the predicted time of a step, seconds, as the mean over `STATES` states of the links' samples."""
        return float(self._times_s(plan, samples).mean())

    def _times_s(self, plan: Plan, samples: Mapping[str, Sequence[LinkSample]]) -> Floats:
        """Return the predicted time of a step in `STATES` states of the links' samples, seconds, [states]."""
        networks = [
            forecast_paths(plan, self._believed, {name: _at(each, state) for name, each in samples.items()})
            for state in range(STATES)
        ]
        return self.bias.factor(plan) * step_times_s(plan, self._scenario, networks)

    def interval_s(self, plan: Plan) -> tuple[float, float] | None:
        """Return the times between which the next step is expected with a probability of `PROBABILITY`, seconds.

        None if the errors of predictions are unknown, as at the start of a run.
        """
        spread = self.bias.spread(plan)
        if spread is None:
            return None
        # States of the links, each with the error that predictions have for known ones.
        found_s = np.outer(self._times_s(plan, self._samples()), np.exp(spread * _ERRORS)).ravel()
        least_s, most_s = np.quantile(found_s, [(1 - PROBABILITY) / 2, (1 + PROBABILITY) / 2])
        return float(least_s), float(most_s)

    def used(self, plan: Plan) -> set[str]:
        """Return the names of the links between regions that a plan uses, whose rates may be unknown or change."""
        pairs = {pair for pipeline in plan.pipelines for pair in between_stages(pipeline)}
        devices = plan.devices
        if len(plan.pipelines) > 1 or any(len(s.replicas) > 1 for p in plan.pipelines for s in p.stages):
            pairs |= {(one, other) for one in devices for other in devices if one != other}
        crossed = {link.name for pair in pairs for link in self._scenario.cluster.path(*pair)}
        return crossed & self._scenario.cluster.wan_links

    def is_known(self, plan: Plan) -> bool:
        """Return whether all links between regions that a plan uses have been observed lately."""
        return all(_is_fresh(self.links[name]) for name in self.used(plan))

    def regime_s(self, *plans: Plan) -> tuple[float, float]:
        """Return the shortest expected rest of a regime of the links of plans, and the age of the youngest, seconds."""
        links = [self.links[name] for plan in plans for name in self.used(plan)]
        dwell_s = min((link.expected_dwell_s for link in links), default=math.inf)
        return dwell_s, min((link.age_s for link in links), default=math.inf)

    def stale_links(self) -> list[str]:
        """Return the names of the links between regions that have not been observed lately."""
        wide = self._scenario.cluster.wan_links
        return [name for name, link in self.links.items() if name in wide and link.unseen_s > FRESH_S]

    def observed(self) -> Scenario:
        """Return the scenario with links as observed."""
        return with_links(self._scenario, self._observed_links())

    def _observed_links(self) -> Links:
        """Return the links at the harmonic mean of their sampled rates, for mean transfer times, and mean latencies."""
        wire = 1 / payload_bps(self._scenario.effects.network, 1.0)
        links = {}
        for name, link in self.links.items():
            seconds_per_bit = [1 / max(sample.rate_bps, LEAST_BPS) for sample in link.samples]
            latency_s = float(np.mean([sample.latency_s for sample in link.samples]))
            links[name] = wire / float(np.mean(seconds_per_bit)), latency_s
        return links

    def slow(self) -> Scenario:
        """Return the scenario with links at low rates, the second of `link_states`."""
        return with_links(self._scenario, self.link_states()[1])

    def worst(self) -> Scenario:
        """Return the scenario with links as slow as they may be during a move.

        Links are as they were observed; those that have not been used lately have `UNSEEN` of that or of the declared
        rate.
        """
        links = {}
        for name, (rate_bps, latency_s) in self._observed_links().items():
            links[name] = rate_bps if _is_fresh(self.links[name]) else UNSEEN * rate_bps, latency_s
        return with_links(self._scenario, links)

    def link_states(self) -> tuple[Links, ...]:
        """Return states of the links for which plans are wanted: first the means of the samples.

        The others are the rates that a quarter of the samples is below, `COLLAPSED` of the means, and the means as if
        nothing went over links that are not known, since only plans on known links can be used at once. If samples
        hardly differ, `SLOW` of the mean replaces the quartile: rates vary within steps too.
        """
        mean, slow, collapsed, known = {}, {}, {}, {}
        wire = 1 / payload_bps(self._scenario.effects.network, 1.0)
        for name, link in self.links.items():
            rates_bps = [wire * max(sample.rate_bps, LEAST_BPS) for sample in link.samples]
            latency_s = float(np.mean([sample.latency_s for sample in link.samples]))
            mean[name] = float(np.mean(rates_bps)), latency_s
            slow[name] = min(float(np.quantile(rates_bps, 0.25)), SLOW * mean[name][0]), latency_s
            collapsed[name] = COLLAPSED * mean[name][0], latency_s
            # Links inside a region, which cannot be probed, count as declared until they are used.
            is_unknown = name in self._scenario.cluster.wan_links and not _is_fresh(link)
            known[name] = (LEAST_BPS, 0.0) if is_unknown else mean[name]
        return mean, slow, collapsed, known


def _is_fresh(link: LinkForecast) -> bool:
    """Return whether a link has been observed lately."""
    return link.is_seen and link.unseen_s <= FRESH_S


def _at(samples: Sequence[LinkSample], state: int) -> LinkSample:
    """Return a link's sample for one of the `STATES` network states, which are spread evenly over the samples."""
    return samples[(2 * state + 1) * len(samples) // (2 * STATES)]
