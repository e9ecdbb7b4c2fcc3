"""What the links between regions will carry, judged by what steps have shown of them.

Of each link every step that used it leaves a sample: its rate, its latency and for how long that held. A regime is what
a link does between two changes of the mean of its rate's logarithm, which Page-Hinkley finds; samples of earlier
regimes count for nothing. The forecast is the regime's samples themselves, not their mean: a plan has to live with the
slow moments too. How long regimes last is learned from those that are over.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from planner.adapt.policy import Observation
from planner.cost.network import ConstantRatePath, Paths, payload_bps
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.evaluate import contention_factors
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class ChangeSums:
    """What both detectors are made of.

    Attributes:
        slack: Deviation that counts for nothing, in the values' unit; half of the least change worth finding is usual.
        threshold: A sum above it is a change, in the values' unit.
        up: Sum of what values exceeded the reference by.
        down: Sum of what they fell short of it by.

    Raises:
        InputError: Slack or threshold is negative or not finite.
    """

    slack: float
    threshold: float
    up: float = 0.0
    down: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.slack < math.inf or not 0 <= self.threshold < math.inf:
            raise InputError(
                f"a slack of {self.slack:g} and a threshold of {self.threshold:g}",
                valid="both are finite and not negative",
            )

    @property
    def rose(self) -> bool:
        """Whether the mean went up."""
        return self.up > self.threshold

    @property
    def fell(self) -> bool:
        """Whether the mean went down."""
        return self.down > self.threshold

    @property
    def changed(self) -> bool:
        """Whether the mean went up or down."""
        return self.rose or self.fell

    def after_deviation(self, deviation: float) -> Self:
        """Return the sums after one value more.

        Args:
            deviation: What the value exceeds the reference by, in the values' unit.
        """
        up = max(0.0, self.up + deviation - self.slack)
        down = max(0.0, self.down - deviation - self.slack)
        return replace(self, up=up, down=down)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cusum(ChangeSums):
    """Tabular CUSUM: has the mean left a target?

    Attributes:
        target: The mean of unchanged values.
    """

    target: float

    def after(self, value: float) -> Self:
        """Return the detector that has seen one ``value`` more, in the target's unit."""
        return self.after_deviation(value - self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHinkley(ChangeSums):
    """Page-Hinkley: has the mean left that of the values before?

    Attributes:
        count: Values seen.
        mean: Of all of them.
    """

    count: int = 0
    mean: float = 0.0

    def after(self, value: float) -> Self:
        """Return the detector that has seen one ``value`` more, which is part of the mean already."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        return replace(self.after_deviation(value - mean), count=count, mean=mean)


# Assumed: how long a link stays as it is, before any change was seen, seconds.
FIRST_DWELL_S = 600.0

# Samples of a link that are kept, seconds.
MEMORY_S = 900.0

# Page-Hinkley on logarithms of rates. Assumed: half of a change by a factor of two is slack; the sum must reach what
# 20 steps at such a change would give, which bursts of some seconds do not.
SLACK = math.log(2) / 2
THRESHOLD = 20 * (math.log(2) - SLACK)

# A rate below this counts as this, bits per second: an outage has no logarithm.
LEAST_BPS = 1e4


@dataclass(frozen=True, slots=True)
class LinkSample:
    """What a step showed of a link.

    Attributes:
        rate_bps: Bits of payload per second while busy.
        latency_s: One way, seconds.
        duration_s: Of the step, seconds.
    """

    rate_bps: float
    latency_s: float
    duration_s: float


class LinkForecast:
    """One link's regime so far; one object for one run.

    Args:
        rate_bps: What is declared, bits per second.
        latency_s: One way, seconds.
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
        """Seconds of the regime that were seen."""
        return self._age_s

    @property
    def expected_dwell_s(self) -> float:
        """How long the regime is expected to go on, seconds: the mean of those before, or as long as it has lasted."""
        return max(self._age_s, sum(self._dwells_s) / len(self._dwells_s))

    @property
    def samples(self) -> tuple[LinkSample, ...]:
        """Of the regime, the newest last; what is declared where none was seen."""
        return tuple(self._samples) or (self.declared,)

    def learn(self, sample: LinkSample) -> bool:
        """Take note of a step that used the link; return whether its rate has changed for good."""
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
        self._begin()
        self._samples.append(sample)
        return True

    def pass_over(self, duration_s: float) -> None:
        """Take note of a step that did not use the link."""
        self.unseen_s += duration_s

    def restart(self) -> None:
        """Begin a regime of which nothing is known: the link was out of sight too long."""
        self._begin()

    def _begin(self) -> None:
        self._detector = PageHinkley(slack=SLACK, threshold=THRESHOLD)
        self._samples.clear()
        self._age_s = 0.0


def observed_links(observation: Observation, scenario: Scenario) -> dict[str, tuple[float, float | None]]:
    """Return rate and latency of each link between regions that a step used, bits per second and seconds, by name.

    A path over several such links is put down to each of them. Where several flows share a link, the fastest counts
    with its share made whole.
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
    """Return the plan's paths where links are as in ``states``, by name, each flow with its share of them."""
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
        return ConstantRatePath(max(rate_bps, LEAST_BPS) / factors.get((source, target), 1.0), latency_s)

    return path
