"""Policy ``cloudless``: repeats elastic scheduling when devices become faster or slower, leave or return.

For each device, the policy keeps a weighted mean of the ratio of its compute time to the profile, and makes the elastic
schedule for these speeds. The plan changes if the new one is clearly faster, or clearly cheaper and hardly slower. The
number of steps between exchanges follows the measured steps (`planner.systems.cloudless.accumulation`). The global
batch and the synchronisation method never change. If the scenario says where data are stored, the regions'
parts of the batch do not change either, as long as each of these regions has a device.

Pipelines that exchange updates without a barrier go on while devices of one of them come and go between two of its
steps. The first device of a region stays, since it exchanges the region's updates; the regions of the plan stay too. If
one of them has no device left that could be rented, only the division of samples changes.

Assumption: the public text of the paper (arXiv 2303.05330) says that scheduling is elastic, but not when it is
repeated.
"""

from dataclasses import replace

from planner.adapt.migration import is_reachable
from planner.adapt.observation import Observation
from planner.adapt.policy import with_usable_schedule
from planner.plan.plan import Pipeline, Plan
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.cloudless.accumulation import AdaptiveAccumulation
from planner.systems.cloudless.elastic_scheduling import Offers, Schedule, greedy_schedule, schedule_within
from planner.systems.cloudless.strategy import region_offers, regional_plan
from planner.systems.deepcee.observed_paths import learn_slowdowns
from traces.common.errors import InputError

# Share of the step time or of the step's price that a change must save, so that jitter does not cause changes. A change
# that saves money must not make the step longer by this share or more.
LEAST_GAIN = 0.05

# Share by which the rented devices may be slower than all devices together, so that a small slow-down changes nothing.
SLACK = 0.03


class CloudlessPolicy:
    """The policy ``cloudless``; each run needs an object of its own."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._slowdown: dict[str, float] = {}
        self._accumulation = AdaptiveAccumulation()

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan of the elastic schedule for the observed speeds, with an interval for the measured exchanges.

        The result is None if this plan saves too little, or if lost devices cannot be replaced.
        """
        if not observation.gone:
            # If a device was lost, the step was interrupted and its compute times are incomplete.
            learn_slowdowns(self._slowdown, observation, self._scenario)
        missing = observation.missing
        senders = _senders(plan)
        if senders and (missing.intersection(plan.devices) or len(set(map(self._region, senders))) < len(senders)):
            # Devices are waited for. Plans with several pipelines in a region are not made here.
            return None
        if senders:
            exchanging = self._accumulation.choose(observation, plan, self._step_s(plan))
            return self._better(exchanging, missing) or (exchanging if exchanging != plan else None)
        found = self._better(plan, missing)
        return found if found is not None and is_reachable(observation, found, self._scenario) else None

    def _better(self, plan: Plan, missing: frozenset[str]) -> Plan | None:
        """Return the plan on other devices or with other samples; None if it saves too little."""
        proposed = self._rescheduled(plan, missing)
        if proposed is None or missing.intersection(plan.devices):
            return proposed
        before_s, after_s = self._step_s(plan), self._step_s(proposed)
        faster = after_s <= before_s * (1 - LEAST_GAIN)
        price, other_price = self._price_per_hour(plan), self._price_per_hour(proposed)
        saves = price > 0 and after_s * other_price <= before_s * price * (1 - LEAST_GAIN)
        return proposed if faster or (saves and after_s < before_s * (1 + LEAST_GAIN)) else None

    def _rescheduled(self, plan: Plan, missing: frozenset[str]) -> Plan | None:
        """Return the plan on the devices that elastic scheduling rents now; None if the model fits on none of them."""
        # Devices outside the plan count as slower, so that they replace others only if they are clearly better.
        slowdown = {
            name: self._slowdown.get(name, 1.0) * (1.0 if name in plan.devices else 1 + SLACK)
            for name in self._scenario.cluster.by_name
        }
        try:
            offers = region_offers(self._scenario, plan.strategy, slowdown, missing)
            senders = _senders(plan)
            if senders and {*offers} != {self._region(sender) for sender in senders}:
                return self._rebalanced(plan)
            schedule = schedule_within(offers, (1 + SLACK) * greedy_schedule(offers).run_time_s, senders)
            return self._as_running(plan, offers, schedule)
        except InputError:
            return None

    def _region(self, device: str) -> str:
        return self._scenario.cluster.by_name[device].region

    def _rebalanced(self, plan: Plan) -> Plan:
        """Return the plan on the same devices, with samples in proportion to their observed speeds."""
        others = set(self._scenario.cluster.by_name).difference(plan.devices)
        offers = region_offers(self._scenario, plan.strategy, self._slowdown, others)
        return self._as_running(plan, offers, greedy_schedule(offers))

    def _as_running(self, plan: Plan, offers: Offers, schedule: Schedule) -> Plan:
        pipelines = regional_plan(self._scenario, plan.strategy, offers, schedule).pipelines
        if senders := _senders(plan):
            regions = list(offers)
            pipelines = tuple(_led(pipelines[regions.index(self._region(sender))], sender) for sender in senders)
        return with_usable_schedule(plan, replace(plan, pipelines=pipelines), self._scenario)

    def _step_s(self, plan: Plan) -> float:
        return step_time_s(plan, self._scenario, slowdown=self._slowdown)

    def _price_per_hour(self, plan: Plan) -> float:
        devices = self._scenario.cluster.by_name
        return sum(devices[name].price_per_hour for name in plan.devices)


def _senders(plan: Plan) -> list[str]:
    """Return the device of each pipeline that exchanges its updates; none if all devices sum gradients together."""
    waits = plan.synchronisation.method == "allreduce"
    return [] if waits else [pipeline.stages[0].replicas[0].device for pipeline in plan.pipelines]


def _led(pipeline: Pipeline, first: str) -> Pipeline:
    """Return a pipeline of one stage with its replica on device ``first`` before the others."""
    (stage,) = pipeline.stages
    replicas = tuple(sorted(stage.replicas, key=lambda replica: replica.device != first))
    return replace(pipeline, stages=(replace(stage, replicas=replicas),))
