"""Forecasts of the links between regions, and the bias of predicted step times, learned from the steps of a run.

Every step that uses a link leaves a sample of its rate, its latency and how long it held. A regime is the time between
two changes of the mean of the rate's logarithm, which the Page-Hinkley test finds; samples of earlier regimes do not
count. The forecast is the regime's samples themselves, not their mean, since a plan meets the slow moments too. The
lengths of past regimes say how long one is expected to last.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.adapt.policy import Observation
from planner.cost.network import ConstantRatePath, Paths, payload_bps
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.evaluate import contention_factors
from traces.common.errors import InputError

# Assumed: length of a regime before any change was seen, seconds.
FIRST_DWELL_S = 600.0

# Age of the oldest sample of a link that is kept, seconds.
MEMORY_S = 900.0

# Page-Hinkley on logarithms of rates. Assumed: half of a change by a factor of two is slack; the threshold is the sum
# that 20 steps at such a change give, which bursts of some seconds do not reach.
SLACK = math.log(2) / 2
THRESHOLD = 20 * (math.log(2) - SLACK)

# Least rate that a sample counts with, bits per second: an outage has no logarithm.
LEAST_BPS = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHinkley:
    """Page-Hinkley test, one value at a time: has the mean of a series changed?

    Two sums add up by how much values deviate from the mean so far, less a slack, and never fall below zero; a sum
    above the threshold is a change. After a change a new detector starts::

        up   = max(0, up   + (value - mean) - slack)
        down = max(0, down - (value - mean) - slack)

    Sources: Page, Continuous Inspection Schemes, Biometrika 1954; Hinkley, Inference about the Change-Point from
    Cumulative Sum Tests, Biometrika 1971.

    Attributes:
        slack: Deviation that does not count, in the values' unit; usually half of the least change worth finding.
        threshold: Least sum that is a change, in the values' unit.
        up: Sum of the deviations above the mean.
        down: Sum of the deviations below the mean.
        count: Number of values seen.
        mean: Mean of all values seen.

    Raises:
        InputError: Slack or threshold is negative or not finite.
    """

    slack: float
    threshold: float
    up: float = 0.0
    down: float = 0.0
    count: int = 0
    mean: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.slack < math.inf or not 0 <= self.threshold < math.inf:
            raise InputError(
                f"a slack of {self.slack:g} and a threshold of {self.threshold:g} are not allowed",
                valid="both are finite and not negative",
            )

    @property
    def changed(self) -> bool:
        """Whether the mean went up or down."""
        return max(self.up, self.down) > self.threshold

    def after(self, value: float) -> "PageHinkley":
        """Return the detector that has seen one ``value`` more; the mean includes it."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        deviation = value - mean
        up = max(0.0, self.up + deviation - self.slack)
        down = max(0.0, self.down - deviation - self.slack)
        return replace(self, up=up, down=down, count=count, mean=mean)


@dataclass(frozen=True, slots=True)
class LinkSample:
    """One step's sample of a link.

    Attributes:
        rate_bps: Payload rate while busy, bits per second.
        latency_s: One-way latency, seconds.
        duration_s: Duration of the step, seconds.
    """

    rate_bps: float
    latency_s: float
    duration_s: float


class LinkForecast:
    """The current regime of one link; one object for one run.

    Args:
        rate_bps: Declared rate, bits per second.
        latency_s: Declared one-way latency, seconds.
    """

    def __init__(self, rate_bps: float, latency_s: float) -> None:
        self.declared = LinkSample(rate_bps, latency_s, 0.0)
        self._detector = PageHinkley(slack=SLACK, threshold=THRESHOLD)
        self._samples: deque[LinkSample] = deque()
        self._dwells_s = [FIRST_DWELL_S]
        self._age_s = 0.0
        self.unseen_s = 0.0

    @property
    def age_s(self) -> float:
        """Seconds of the regime in which the link was used."""
        return self._age_s

    @property
    def expected_dwell_s(self) -> float:
        """Seconds for which the regime is expected to go on: the mean length of earlier ones, or its age if longer."""
        return max(self._age_s, sum(self._dwells_s) / len(self._dwells_s))

    @property
    def samples(self) -> tuple[LinkSample, ...]:
        """The regime's samples, the newest last; the declared rate and latency if there are none."""
        return tuple(self._samples) or (self.declared,)

    def learn(self, sample: LinkSample) -> bool:
        """Add the sample of a step that used the link; return whether a new regime begins."""
        self.unseen_s = 0.0
        self._samples.append(sample)
        self._age_s += sample.duration_s
        kept_s = sum(each.duration_s for each in self._samples)
        while len(self._samples) > 1 and kept_s > MEMORY_S:
            kept_s -= self._samples.popleft().duration_s
        self._detector = self._detector.after(math.log(max(sample.rate_bps, LEAST_BPS)))
        if not self._detector.changed:
            return False
        self._dwells_s.append(self._age_s)
        self.restart()
        self._samples.append(sample)
        return True

    def skip(self, duration_s: float) -> None:
        """Note a step that did not use the link."""
        self.unseen_s += duration_s

    def restart(self) -> None:
        """Begin a regime without samples, after a link has been unused for too long."""
        self._detector = PageHinkley(slack=SLACK, threshold=THRESHOLD)
        self._samples.clear()
        self._age_s = 0.0


def observed_links(observation: Observation, scenario: Scenario) -> dict[str, tuple[float, float | None]]:
    """Return rate and latency of each link between regions that a step used, bits per second and seconds, by name.

    The rate of a path over several such links counts for each of them. Where several flows share a link, the fastest
    one counts, scaled up to the whole link.
    """
    factors = contention_factors(observation.plan, scenario)
    seen: dict[str, tuple[float, float | None]] = {}
    for path in observation.paths:
        whole_bps = path.rate_bps * factors.get((path.source, path.target), 1.0)
        links = [link for link in scenario.cluster.path(path.source, path.target) if link.source != link.target]
        declared_s = sum(link.latency_s for link in links)
        for link in links:
            part = link.latency_s / declared_s if declared_s else 1 / len(links)
            latency_s = None if path.latency_s is None else max(0.0, path.latency_s * part)
            before_bps, before_s = seen.get(link.name, (0.0, None))
            known_s = [each for each in (before_s, latency_s) if each is not None]
            seen[link.name] = max(before_bps, whole_bps), min(known_s, default=None)
    return seen


def forecast_paths(plan: Plan, scenario: Scenario, states: Mapping[str, LinkSample]) -> Paths:
    """Return the plan's paths with links as in ``states``, by link name; each flow has its share of a link."""
    factors = contention_factors(plan, scenario)

    def path(source: str, target: str) -> ConstantRatePath:
        links = scenario.cluster.path(source, target)
        seen = [(states.get(link.name), link) for link in links]
        rate_bps = min(
            (
                state.rate_bps if state else payload_bps(scenario.effects.network, link.bandwidth_bps)
                for state, link in seen
            ),
            default=math.inf,
        )
        latency_s = sum(state.latency_s if state else link.latency_s for state, link in seen)
        jitter_s = sum(link.jitter_s for state, link in seen if state is None)
        rate_bps = max(rate_bps, LEAST_BPS) / factors.get((source, target), 1.0)
        # A state is what messages really reached: it has a link's size curve in it.
        curves = tuple(link.size_curve for state, link in seen if state is None and link.size_curve is not None)
        return ConstantRatePath(rate_bps, latency_s, curves, scenario.effects.network.share, jitter_s)

    return path


# Least weight of the newest step: older steps fade.
LEAST_WEIGHT = 1 / 30

# The mean of a kind counts as much as so many steps of the plan itself.
STEPS_OF_KIND = 4


@dataclass(slots=True)
class _Mean:
    """Running mean of logarithms of ratios."""

    value: float = 0.0
    steps: int = 0

    def learn(self, value: float) -> None:
        self.steps += 1
        self.value += max(LEAST_WEIGHT, 1 / self.steps) * (value - self.value)


class PredictionBias:
    """Ratios of measured to predicted seconds of a step; one object for one run.

    A prediction assumes that rates are constant during a step. Where they vary, a fixed order waits for each slow
    moment in turn, a dynamic order waits less, and a plan on one device not at all. The factor of a plan is learned
    from its own steps, and from those of plans of its kind as long as it has few.
    """

    def __init__(self) -> None:
        self._plans: dict[Plan, _Mean] = {}
        self._kinds: dict[str, _Mean] = {}

    def learn(self, plan: Plan, measured_s: float, predicted_s: float) -> None:
        """Learn from one step of a plan."""
        value = math.log(measured_s / predicted_s)
        self._plans.setdefault(plan, _Mean()).learn(value)
        self._kinds.setdefault(_kind(plan), _Mean()).learn(value)

    def has_run(self, plan: Plan) -> bool:
        """Return whether any step of the plan has been learned from."""
        return plan in self._plans

    def factor(self, plan: Plan) -> float:
        """Return the factor by which a prediction for a plan is multiplied; 1 if nothing is known."""
        own, kind = self._plans.get(plan, _Mean()), self._kinds.get(_kind(plan), _Mean())
        return math.exp((own.steps * own.value + STEPS_OF_KIND * kind.value) / (own.steps + STEPS_OF_KIND))


def _kind(plan: Plan) -> str:
    return "alone" if len(plan.devices) == 1 else plan.order
