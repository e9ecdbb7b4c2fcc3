"""Probes of links that the current plan does not use: the first or last layer is moved behind such a link.

While a plan uses one region only, the rates of the links to other regions stay unknown: packet pairs only tell that a
link has far less than its rate (`planner.adapt.unused_links`). To measure them, a few steps send all samples over such
a link. Most models have a small first and last layer, which can be moved to the other region and back in little time;
moving half of the model would take long.
"""

import math
from collections.abc import Collection
from dataclasses import replace

from planner.check import is_possible
from planner.cost.in_flight import fitting_depths
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario

# Most microbatches of a step of a probing plan: enough for compute and transfers to overlap.
MICROBATCHES = 16

# Seconds until unused links are probed for the first time; the wait doubles after each probe that finds no better plan.
PROBE_AFTER_S = 120.0

# Least and most steps of a probe, and the share of the run's time that all probes together may cost.
LEAST_PROBE_STEPS, MOST_PROBE_STEPS = 2, 12
PROBE_SHARE = 0.01

# Least ratio of the time that could be saved in what is left of the run, if unused links are as declared, to the time
# that a probe of slow links takes: most probes find nothing better.
PROBE_ODDS = 5.0

# A probe whose first step takes so many times as long as it may on slow links is given up at once: latencies of links
# that were never seen may be far above the declared ones.
SURPRISE = 3.0


class Probes:
    """The probes of one run: when the next is due, and the one that is under way.

    Attributes:
        incumbent: The plan to which a run returns from the probe that is under way; None if there is no probe.
        steps: Finished steps of this probe.
    """

    def __init__(self) -> None:
        self.incumbent: Plan | None = None
        self.steps = 0
        self._cost_s = 0.0
        self._longest_first_s = math.inf
        self._ended_s = 0.0
        self._wait_s = PROBE_AFTER_S

    def are_due(self, elapsed_s: float) -> bool:
        """Return whether the last probe of a run of ``elapsed_s`` seconds has ended long enough ago."""
        return elapsed_s - self._ended_s >= self._wait_s

    def can_cost(self, loss_s: float, moving_s: float, elapsed_s: float) -> bool:
        """Return whether all probes cost at most `PROBE_SHARE` of a run with another one that costs ``loss_s`` seconds.

        One move of ``moving_s`` seconds is not counted: at the beginning of a run no share of it would pay one.
        """
        return self._cost_s + loss_s <= PROBE_SHARE * elapsed_s + moving_s

    def can_go_on(self) -> bool:
        """Return whether the probe may take further steps, if these are likely to show that a plan is better."""
        return self.steps < MOST_PROBE_STEPS

    def begin(self, incumbent: Plan, loss_s: float = 0.0, first_s: float = math.inf) -> None:
        """Begin a probe that is expected to cost ``loss_s`` seconds, and its first step at most ``first_s``."""
        self.incumbent, self.steps = incumbent, 0
        self._cost_s += loss_s
        self._longest_first_s = first_s

    def add_step(self, duration_s: float) -> bool:
        """Add a finished step of the probe; return whether it is the first one and took far longer than expected."""
        self.steps += 1
        return self.steps == 1 and duration_s > SURPRISE * self._longest_first_s

    def end(self, elapsed_s: float, *, found: bool) -> None:
        """End the probe; if it has found no better plan, the next one follows after twice the wait."""
        self.incumbent, self._ended_s = None, elapsed_s
        self._wait_s = PROBE_AFTER_S if found else 2 * self._wait_s

    def give_up(self) -> None:
        """End the probe without a result: the run continues with another plan than the incumbent or returns to it."""
        self.incumbent = None


def probing_plan(plan: Plan, scenario: Scenario, links: Collection[str], away: Collection[str]) -> Plan | None:
    """Return the plan with its last layer, its first layer or both moved across ``links``; None if impossible.

    Args:
        plan: Current plan, for which a probe is possible only if it has one pipeline and sums gradients in every step.
        scenario: Scenario that the plan is for.
        links: Names of the links to probe.
        away: Names of devices that are absent.
    """
    if len(plan.pipelines) != 1 or plan.synchronisation.method != "allreduce":
        return None
    stages = plan.pipelines[0].stages
    ahead = _beyond(scenario, stages[-1], links, {*away, *plan.devices})
    if ahead is not None and stages[-1].end_layer - stages[-1].first_layer > 1:
        last = stages[-1]
        cut = last.end_layer - 1
        stages = (*stages[:-1], replace(last, end_layer=cut), Stage(cut, last.end_layer, (Replica(ahead),), 1))
    used = {device for stage in stages for replica in stage.replicas for device in replica.devices}
    behind = _beyond(scenario, stages[0], links, {*away, *used}, other_than=ahead)
    if behind is not None and stages[0].end_layer - stages[0].first_layer > 1:
        first = stages[0]
        stages = (Stage(0, 1, (Replica(behind),), 1), replace(first, first_layer=1), *stages[1:])
    return _with_depths(plan, stages, scenario) if len(stages) > len(plan.pipelines[0].stages) else None


def _beyond(
    scenario: Scenario, stage: Stage, links: Collection[str], taken: Collection[str], other_than: str | None = None
) -> str | None:
    """Return a device at the other end of one of ``links``, seen from ``stage``, or None if there is none.

    The device is neither in ``taken`` nor in the region of the device ``other_than``.
    """
    here, wan_links = stage.replicas[0].device, scenario.cluster.wan_links
    near = {scenario.cluster.by_name[name].region for name in (here, other_than) if name is not None}
    for device in scenario.cluster.devices:
        wide = [link.name for link in scenario.cluster.path(here, device.name) if link.name in wan_links]
        if device.region not in near and device.name not in taken and len(wide) == 1 and wide[0] in links:
            return device.name
    return None


def _with_depths(plan: Plan, stages: tuple[Stage, ...], scenario: Scenario) -> Plan | None:
    samples = plan.pipelines[0].samples
    count = max(number for number in range(1, MICROBATCHES + 1) if samples % number == 0)
    microbatches = (samples // count,) * count
    # All in flight, if there is memory: the latencies that the probe meets then delay a step once, not each microbatch.
    depths = fitting_depths([count] * len(stages), stages, scenario, microbatches)
    if depths is None:
        return None
    pipeline = Pipeline(stages, microbatches).with_depths(depths)
    probing = replace(plan, pipelines=(pipeline,), schedule="1f1b", order="dynamic")
    return probing if is_possible(probing, scenario) else None
