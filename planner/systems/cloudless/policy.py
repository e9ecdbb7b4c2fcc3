"""The policy ``cloudless``: elastic scheduling is repeated when devices become faster or slower, leave or return.

Per device it keeps a weighted mean of the observed compute time relative to the profile, and makes the elastic schedule
for these speeds. The plan changes when the new one is clearly faster, or clearly cheaper and hardly slower. The global
batch and the synchronisation method never change; neither do the regions' parts of the batch where the scenario says
where data are stored, as long as each of these regions has a device. Pipelines that train without a barrier have no
moment between two steps at which devices could come or go: there samples move, between the devices of a region and,
where data are everywhere, between regions.

Assumed: the public text of the paper (arXiv 2303.05330) says that scheduling is elastic, but not when it is repeated.
"""

from dataclasses import replace

from planner.adapt.policy import Observation
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.compile import planned_compute_s
from planner.step.evaluate import step_time_s
from planner.systems.cloudless.elastic_scheduling import Offers, Schedule, greedy_schedule, schedule_within
from planner.systems.cloudless.strategy import region_offers, regional_plan
from traces.common.errors import InputError

# Weight of the newest observation: the mean follows a sudden change to within 10 % in two observations.
NEWEST_WEIGHT = 0.7

# Least share of the step time or of its cost that a change must save, so that jitter does not cause changes. A change
# that saves cost must not raise the step time by this share.
LEAST_GAIN = 0.05

# Limit on the share by which the rented units may be slower than all units: small slow-downs rent no further device.
SLACK = 0.03


class CloudlessPolicy:
    """The policy ``cloudless``; each run needs an object of its own."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._slowdown: dict[str, float] = {}

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan of the elastic schedule for the observed speeds.

        Return None if the plan saves less than `LEAST_GAIN`, or if lost devices cannot be replaced.
        """
        self._learn(observation)
        missing = {*observation.gone, *observation.away}
        asynchronous = plan.synchronisation.method != "allreduce"
        if asynchronous and missing.intersection(plan.devices):
            return None
        proposed = self._rebalanced(plan) if asynchronous else self._rescheduled(plan, missing)
        if proposed is None or missing.intersection(plan.devices):
            return proposed
        before_s, after_s = self._step_s(plan), self._step_s(proposed)
        faster = after_s <= before_s * (1 - LEAST_GAIN)
        price, other_price = self._price_per_hour(plan), self._price_per_hour(proposed)
        saves = price > 0 and after_s * other_price <= before_s * price * (1 - LEAST_GAIN)
        return proposed if faster or (saves and after_s < before_s * (1 + LEAST_GAIN)) else None

    def _learn(self, observation: Observation) -> None:
        if observation.gone:
            # The compute time of an interrupted step is incomplete.
            return
        planned = planned_compute_s(observation.plan, self._scenario)
        for device, compute_s in observation.compute_s:
            planned_s = planned.get(device, 0.0)
            if planned_s > 0 and compute_s > 0:
                newest = compute_s / planned_s
                before = self._slowdown.get(device, newest)
                self._slowdown[device] = NEWEST_WEIGHT * newest + (1 - NEWEST_WEIGHT) * before

    def _rescheduled(self, plan: Plan, missing: set[str]) -> Plan | None:
        """Return the plan on the units that elastic scheduling rents now; None if no present device holds the model."""
        # A device replaces another one only if it is clearly better.
        slowdown = {
            name: self._slowdown.get(name, 1.0) * (1.0 if name in plan.devices else 1 + SLACK)
            for name in self._scenario.cluster.by_name
        }
        try:
            offers = region_offers(self._scenario, plan.strategy, slowdown, missing)
        except InputError:
            return None
        schedule = schedule_within(offers, (1 + SLACK) * greedy_schedule(offers).run_time_s)
        return self._as_running(plan, offers, schedule)

    def _rebalanced(self, plan: Plan) -> Plan:
        """Return the plan on its own devices, with samples in proportion to their speeds."""
        others = set(self._scenario.cluster.by_name).difference(plan.devices)
        offers = region_offers(self._scenario, plan.strategy, self._slowdown, others)
        return self._as_running(plan, offers, greedy_schedule(offers))

    def _as_running(self, plan: Plan, offers: Offers, schedule: Schedule) -> Plan:
        return replace(plan, pipelines=regional_plan(self._scenario, plan.strategy, offers, schedule).pipelines)

    def _step_s(self, plan: Plan) -> float:
        """Return the time of a step at the observed speeds, seconds; no step waits for updates between regions."""
        return step_time_s(plan, self._scenario, slowdown=self._slowdown)

    def _price_per_hour(self, plan: Plan) -> float:
        devices = self._scenario.cluster.by_name
        return sum(devices[name].price_per_hour for name in plan.devices)
