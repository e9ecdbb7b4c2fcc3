"""The policy ``auto``: forecasts links, keeps a portfolio of plans, and changes to the one that saves most time.

Every step adds a sample to the forecast of each link that the step used (`planner.systems.auto.forecast`). Every
`REVIEW_EVERY_S` seconds, and at once when a link has changed, the policy computes the step time of all plans of the
portfolio (`planner.systems.auto.portfolio`) at the forecast rates. A new search is made only for ranges of rates that
no earlier search has covered.

A change that moves no layers (other depths, microbatches or orders) costs nothing, and is made if it saves
`LEAST_GAIN`. A change that moves layers must fulfil two conditions more, which bound the regret:

- the time that it saves in the expected rest of the regime is at least `SAFETY` times the time of the move,
- the time that it would have saved since the regime began is at least the time of the move.

A regime is the time between two changes of a link's mean rate. Links that the plan does not use are probed
(`planner.systems.auto.probing`) for a limited share of the run. The method and all thresholds are our own.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.adapt.migration import migration_between, migration_time_s
from planner.adapt.policy import Observation
from planner.cost.network import payload_bps
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_times_s
from planner.step.graph import Floats
from planner.systems.auto.forecast import (
    LEAST_BPS,
    LinkForecast,
    LinkSample,
    PredictionBias,
    forecast_paths,
    observed_links,
)
from planner.systems.auto.portfolio import MOST_STEPS_DOWN, MOST_STEPS_UP, RATE_STEP, Portfolio
from planner.systems.auto.probing import (
    probing_plan,
)

# Seconds between two reviews of the portfolio, and number of states (a sample of every link) at which plans are timed.
REVIEW_EVERY_S = 20.0
STATES = 12

# Least share of a step's time that a change must save: if no layers move; if layers move to a plan that has run before;
# and to a plan that has not, whose predicted time may be wrong by as much (docs/systems/auto.md).
LEAST_GAIN, LEAST_GAIN_OF_MOVE, LEAST_GAIN_OF_NEW = 0.02, 0.05, 0.10

# Least ratio of the time that a move of layers is expected to save to the time of the move.
SAFETY = 2.0

# Seconds after which unused links are probed for the first time. The wait doubles after a probe that finds no better
# plan.
PROBE_AFTER_S = 120.0

# Least and most steps of a probe, and the share of the run's time that all probes together may lose.
LEAST_PROBE_STEPS, MOST_PROBE_STEPS = 2, 12
PROBE_SHARE = 0.01

# A link's samples are stale if the link has not been used for more than these seconds.
FRESH_S = 60.0


class AutoPolicy:
    """The policy ``auto``; one object for one run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        regions = set(scenario.cluster.regions)
        self._links = {
            # Latencies observed during steps include the jitter, so the declared one must as well.
            link.name: LinkForecast(
                payload_bps(scenario.effects.network, link.bandwidth_bps), link.latency_s + link.jitter_s
            )
            for link in scenario.cluster.links
            if link.source != link.target and {link.source, link.target} <= regions
        }
        self._portfolio: Portfolio | None = None
        self._bias = PredictionBias()
        self._before: Observation | None = None
        self._elapsed_s = 0.0
        self._reviewed_s = 0.0
        self._incumbent: Plan | None = None
        self._probe_steps = 0
        self._probe_s = 0.0
        self._probed_at_s = 0.0
        self._wait_s = PROBE_AFTER_S

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans found so far."""
        return self._portfolio.plans if self._portfolio is not None else ()

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan to use from the next step on, or None to keep ``plan``."""
        if self._portfolio is None:
            self._portfolio = Portfolio(self._scenario, plan)
        away = frozenset({*observation.gone, *observation.away})
        if plan.synchronisation.method != "allreduce":
            return None
        if away.intersection(plan.devices):
            self._incumbent = None
            return self._without(self._portfolio, away)
        if observation.gone:
            return None
        changed = self._learn(observation)
        if observation.plan != plan:
            # The observed step still ran an earlier plan.
            return None
        if self._incumbent is not None:
            return self._after_probe(self._portfolio, plan, self._incumbent, away)
        if not changed and self._elapsed_s - self._reviewed_s < REVIEW_EVERY_S:
            return None
        self._reviewed_s = self._elapsed_s
        self._cover(self._portfolio, away)
        return self._better(self._portfolio, plan, plan, away) or self._probe(self._portfolio, plan, away)

    def _learn(self, observation: Observation) -> bool:
        """Add a step to the forecasts and to the bias; return whether a new regime of any link begins."""
        duration_s = self._duration_s(observation)
        self._elapsed_s += duration_s
        seen = observed_links(observation, self._scenario)
        changed, samples = False, {}
        for name, link in self._links.items():
            if name in seen:
                rate_bps, latency_s = seen[name]
                if link.unseen_s > FRESH_S:
                    link.restart()
                known_s = link.samples[-1].latency_s if latency_s is None else latency_s
                samples[name] = LinkSample(rate_bps, known_s, duration_s)
                changed |= link.learn(samples[name])
            else:
                link.skip(duration_s)
        if self._before is not None and self._before.plan == observation.plan:
            paths = forecast_paths(observation.plan, self._scenario, samples)
            predicted_s = float(step_times_s(observation.plan, self._scenario, [paths])[0])
            self._bias.learn(observation.plan, duration_s, predicted_s)
        self._before = observation
        return changed

    def _duration_s(self, observation: Observation) -> float:
        """Return the time from the end of the previous step to the end of this one, seconds."""
        return observation.end_s - (self._before.end_s if self._before is not None else 0.0)

    def _cover(self, portfolio: Portfolio, away: frozenset[str]) -> None:
        """Search for plans at three sets of link rates: the means, the lower quartiles, and an outage of all links."""
        declared = {link.name: link.bandwidth_bps for link in self._scenario.cluster.links}
        mean, slow = {}, {}
        for name, link in self._links.items():
            rates_bps = [max(sample.rate_bps, LEAST_BPS) / declared[name] for sample in link.samples]
            mean[name] = _steps(float(np.mean(rates_bps)))
            slow[name] = _steps(float(np.quantile(rates_bps, 0.25)))
        for steps in (mean, slow, dict.fromkeys(self._links, -MOST_STEPS_DOWN)):
            portfolio.cover(tuple(sorted(steps.items())), away)

    def _better(self, portfolio: Portfolio, plan: Plan, incumbent: Plan, away: frozenset[str]) -> Plan | None:
        """Return the plan that saves most time compared with ``incumbent`` after the move from ``plan``, or None."""
        own_s = self._times_s(incumbent)
        observed = self._observed()
        best, best_s = None, 0.0
        for other in portfolio.plans:
            if other == incumbent or away.intersection(other.devices) or not self._is_known(other):
                continue
            saved_share = 1 - float(self._times_s(other).mean() / own_s.mean())
            moving_s = migration_time_s(migration_between(plan, other, observed), observed)
            dwell_s, age_s = self._regime_s({*self._used(incumbent), *self._used(other)})
            is_move = moving_s > 0
            if saved_share < self._least_gain(other, is_move):
                continue
            if is_move and (dwell_s * saved_share < SAFETY * moving_s or age_s * saved_share < moving_s):
                continue
            net_s = dwell_s * saved_share - moving_s
            if net_s > best_s:
                best, best_s = other, net_s
        return best

    def _least_gain(self, plan: Plan, is_move: bool) -> float:
        if not is_move:
            return LEAST_GAIN
        return LEAST_GAIN_OF_MOVE if self._bias.has_run(plan) else LEAST_GAIN_OF_NEW

    def _times_s(self, plan: Plan, optimistic: bool = False) -> Floats:
        """Return the seconds of a step in each forecast state, [`STATES`]; optimistic: stale links as declared."""
        samples = {name: self._optimistic(link) if optimistic else link.samples for name, link in self._links.items()}
        networks = [
            forecast_paths(plan, self._scenario, {name: _at(each, state) for name, each in samples.items()})
            for state in range(STATES)
        ]
        return self._bias.factor(plan) * step_times_s(plan, self._scenario, networks)

    def _optimistic(self, link: LinkForecast) -> tuple[LinkSample, ...]:
        """Return the samples of a link; if they are stale, a single one with the declared rate and latency."""
        return link.samples if link.unseen_s <= FRESH_S and link.age_s > 0 else (link.declared,)

    def _used(self, plan: Plan) -> set[str]:
        """Return the names of the links between regions that a plan uses."""
        pairs = set()
        for pipeline in plan.pipelines:
            for left, right in zip(pipeline.stages, pipeline.stages[1:], strict=False):
                ends = [(one.device, other.device) for one in left.replicas for other in right.replicas]
                pairs |= {pair for both in ends for pair in (both, both[::-1])}
        devices = plan.devices
        if len(plan.pipelines) > 1 or any(len(s.replicas) > 1 for p in plan.pipelines for s in p.stages):
            pairs |= {(one, other) for one in devices for other in devices if one != other}
        crossed = {link.name for pair in pairs if pair[0] != pair[1] for link in self._scenario.cluster.path(*pair)}
        return crossed & self._links.keys()

    def _is_known(self, plan: Plan) -> bool:
        links = [self._links[name] for name in self._used(plan)]
        return all(link.age_s > 0 and link.unseen_s <= FRESH_S for link in links)

    def _regime_s(self, links: set[str]) -> tuple[float, float]:
        """Return the shortest expected rest of the links' regimes, and the shortest age of one, seconds."""
        dwell_s = min((self._links[name].expected_dwell_s for name in links), default=math.inf)
        return dwell_s, min((self._links[name].age_s for name in links), default=math.inf)

    def _observed(self) -> Scenario:
        """Return the scenario with links at the harmonic mean of their samples' rates, which gives mean times."""
        links = []
        for link in self._scenario.cluster.links:
            if link.name in self._links:
                rates_bps = [max(sample.rate_bps, LEAST_BPS) for sample in self._links[link.name].samples]
                link = replace(link, bandwidth_bps=len(rates_bps) / sum(1 / rate for rate in rates_bps))
            links.append(replace(link, trace=None))
        return replace(self._scenario, cluster=Cluster(self._scenario.cluster.devices, tuple(links)))

    def _probe(self, portfolio: Portfolio, plan: Plan, away: frozenset[str]) -> Plan | None:
        """Return a plan that probes stale links, or None if no probe is due, affordable and likely to save time."""
        stale = [name for name, link in self._links.items() if link.unseen_s > FRESH_S]
        if not stale or self._elapsed_s - self._probed_at_s < self._wait_s:
            return None
        own_s = float(self._times_s(plan).mean())
        others = [each for each in portfolio.plans if not away.intersection(each.devices)]
        optimistic_s = min(float(self._times_s(each, optimistic=True).mean()) for each in others)
        probing = probing_plan(plan, self._scenario, stale, away)
        if probing is None or optimistic_s > own_s * (1 - LEAST_GAIN_OF_MOVE):
            return None
        observed = self._observed()
        moving_s = migration_time_s(migration_between(plan, probing, observed), observed)
        loss_s = max(0.0, float(self._times_s(probing).mean()) - own_s) * (LEAST_PROBE_STEPS + 2) + 2 * moving_s
        if self._probe_s + loss_s > PROBE_SHARE * self._elapsed_s + moving_s:
            return None
        self._probe_s += loss_s
        self._incumbent, self._probe_steps = plan, 0
        return probing

    def _after_probe(self, portfolio: Portfolio, plan: Plan, incumbent: Plan, away: frozenset[str]) -> Plan | None:
        """Return a plan that the probe has shown to be better, else the incumbent; None to continue the probe."""
        self._probe_steps += 1
        if self._probe_steps < LEAST_PROBE_STEPS:
            return None
        self._cover(portfolio, away)
        better = self._better(portfolio, plan, incumbent, away)
        own_s = float(self._times_s(incumbent).mean())
        known = [each for each in portfolio.plans if not away.intersection(each.devices) and self._is_known(each)]
        best_s = min((float(self._times_s(each).mean()) for each in known), default=math.inf)
        promising = best_s < own_s * (1 - LEAST_GAIN_OF_MOVE) and self._probe_steps < MOST_PROBE_STEPS
        if better is None and promising:
            return None
        self._probed_at_s, self._incumbent = self._elapsed_s, None
        self._wait_s = PROBE_AFTER_S if better is not None else 2 * self._wait_s
        return better or incumbent

    def _without(self, portfolio: Portfolio, away: frozenset[str]) -> Plan | None:
        """Return the plan with the shortest mean step on the devices that are present; None if there is none."""
        self._cover(portfolio, away)
        able = [each for each in portfolio.plans if not away.intersection(each.devices)]
        return min(able, key=lambda each: float(self._times_s(each).mean()), default=None)


def _steps(ratio: float) -> int:
    """Return the exponent n of `RATE_STEP` ** n nearest to a ratio of rates, within the portfolio's limits."""
    return max(-MOST_STEPS_DOWN, min(MOST_STEPS_UP, round(math.log(ratio, RATE_STEP))))


def _at(samples: Sequence[LinkSample], state: int) -> LinkSample:
    """Return a link's sample for one of the `STATES` states, which are spread evenly over the samples."""
    return samples[(2 * state + 1) * len(samples) // (2 * STATES)]
