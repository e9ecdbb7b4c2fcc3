"""Which workers are left out because exchanges with them take too long, and for how long.

All workers wait for the slowest path when they exchange. Behind such a path a worker, or all workers of a region, cost
the others more time than they save them, if the time to a loss is shorter with the others alone, who then train their
samples, with settings of exchanges that are best for them. They are left out when they have cost as much as their
return will: the move of their state, and the steps until the exchanges with them are measured, both at the rates that
were seen last. So a short failure of a link leaves nobody out, and a lasting one costs at most about twice as much as
if it had been known.

Nothing shows the paths of a worker that is left out. It is taken back when the others have lost as much without it, and
each time that it is left out again, after twice as long; until then its paths count as slow as they were.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from planner.adapt.copies import layers_of
from planner.adapt.migration import least_migration_s
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.adapt.worker_moves import devices_of, worker_moves
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.scenario import Scenario
from planner.systems.regional.exchange_settings import ExchangeSettings, measured_steps

# Share of the time to a loss that leaving a worker out must save.
LEAST_GAIN = 0.1

# How often further workers behind the slowest paths are looked at, together with those before.
_ROUNDS = 3


class SlowWorkers:
    """The workers that are left out; each run needs an object of its own.

    Attributes:
        exchanges: Chooses the settings of exchanges.
    """

    def __init__(self, scenario: Scenario, exchanges: ExchangeSettings) -> None:
        self._scenario = scenario
        self.exchanges = exchanges
        # By the devices of workers: what these have cost the others, seconds; when they return, run seconds, and with
        # which exchanges; how often they were left out.
        self._cost_s: dict[frozenset[str], float] = {}
        self._until_s: dict[frozenset[str], float] = {}
        self._together: dict[frozenset[str], Synchronisation] = {}
        self._times: dict[frozenset[str], int] = {}

    def devices(self, now_s: float) -> frozenset[str]:
        """Return the devices of the workers that are left out at run second ``now_s``."""
        self._until_s = {devices: until_s for devices, until_s in self._until_s.items() if until_s > now_s}
        return frozenset[str]().union(*self._until_s)

    def with_exchanges(self, plan: Plan) -> Plan:
        """Return a plan with the exchanges that were best for all, if it has workers that were left out before."""
        returned = [devices for devices in self._together if devices.issubset(plan.devices)]
        for devices in returned:
            plan = replace(plan, synchronisation=self._together.pop(devices))
        return plan

    def leave(self, plan: Plan, now_s: float, without: Callable[[frozenset[str]], Plan | None]) -> Plan | None:
        """Return the plan without slow workers, with the best settings for the others; None if it does not pay.

        To be called after each measurement of the exchanges.

        Args:
            plan: The plan of all workers, with the settings that are best for them.
            now_s: Present second of the run.
            without: Returns the plan without some devices; None if there is none.
        """
        exchanges, together = self.exchanges, self.exchanges.score(plan)
        # What workers save that are slow to compute is none of their paths' fault.
        least = exchanges.least(plan)
        scores: dict[frozenset[str], tuple[float, Plan]] = {}
        for devices, others in self._suspects(plan, without):
            if max(least, exchanges.least(others)) <= (1 - LEAST_GAIN) * together:
                score, chosen = exchanges.best(others)
                if max(score, least) <= (1 - LEAST_GAIN) * together:
                    scores[devices] = max(score, least), chosen
        self._cost_s = {
            devices: self._cost_s.get(devices, 0.0) + exchanges.measured_s * (1 - score / together)
            for devices, (score, _) in scores.items()
        }
        if not scores:
            return None
        devices = min(scores, key=lambda each: scores[each][0])
        others = scores[devices][1]
        return_s = max(exchanges.measured_s, self._return_s(plan, others))
        if self._cost_s[devices] < return_s:
            return None
        times = self._times[devices] = self._times.get(devices, 0) + 1
        self._until_s[devices] = now_s + 2 ** (times - 1) * len(plan.pipelines) * return_s
        self._together[devices] = plan.synchronisation
        self._cost_s = {}
        return others

    def _suspects(
        self, plan: Plan, without: Callable[[frozenset[str]], Plan | None]
    ) -> Iterator[tuple[frozenset[str], Plan]]:
        """Yield devices of workers behind the slowest paths, and the plan without them.

        These are the worker with the slowest paths from and to all others, and all workers of its regions; then these
        with the same of those that are left.
        """
        region_of = {name: device.region for name, device in self._scenario.cluster.by_name.items()}
        gone, left = frozenset[str](), plan
        for _ in range(_ROUNDS):
            if len(left.pipelines) < 2:
                return
            between_s, workers = self.exchanges.times(left).between_s, [*map(devices_of, left.pipelines)]
            slowest = workers[int(np.argmax(between_s.sum(axis=0) + between_s.sum(axis=1)))]
            regions = {region_of[name] for name in slowest}
            near = [each for each in workers if regions.issuperset(region_of[name] for name in each)]
            further = gone, left
            for group in dict.fromkeys((slowest, slowest.union(*near))):
                others = without(gone.union(group))
                if others is not None:
                    yield gone.union(group), others
                    further = gone.union(group), others
            if further == (gone, left):
                return
            gone, left = further

    def _return_s(self, plan: Plan, others: Plan) -> float:
        """Return the seconds that the return of a worker to ``others`` takes from them, at the rates seen last."""
        held = {device: layers_of(others, device) for device in others.devices}
        moves = worker_moves(held, others, plan, self._scenario)
        move_s = least_migration_s(moves, self._scenario) * float(self.exchanges.factors(plan).max(initial=1.0))
        longer_s = max(0.0, self.exchanges.step_s(plan) - self.exchanges.step_s(others))
        return move_s + (DECISION_LAG_STEPS + 2 * measured_steps(plan.synchronisation.interval_steps)) * longer_s
