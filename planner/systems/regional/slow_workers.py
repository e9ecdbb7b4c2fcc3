"""Which workers are left out because exchanges with them take too long, and for how long.

All workers wait for the slowest path when they exchange. Behind such a path a worker costs the others more time than it
saves them, if the time to a loss is shorter with the others alone, who then train its samples, with settings of
exchanges that are best for them. It is left out when it has cost as much as its return will: the move of its state, and
the steps until the exchanges with it are measured, both at the rates that were seen last. So a short failure of a link
leaves nobody out, and a lasting one costs at most about twice as much as if it had been known.

Nothing shows the paths of a worker that is left out. It is taken back when the others have lost as much without it, and
each time that it is left out again, after twice as long.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.adapt.copies import layers_of
from planner.adapt.migration import migration_time_s
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.adapt.worker_moves import devices_of, worker_moves
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.scenario import Scenario
from planner.systems.regional.exchange_settings import ExchangeSettings, measured_steps

# Share of the time to a loss that leaving a worker out must save.
LEAST_GAIN = 0.1

# Number of workers behind the slowest paths that are looked at.
_SUSPECTS = 2


class SlowWorkers:
    """The workers that are left out; each run needs an object of its own."""

    def __init__(self, scenario: Scenario, exchanges: ExchangeSettings) -> None:
        self._scenario = scenario
        self._exchanges = exchanges
        self._measured_s = 0.0
        # By the devices of a worker: what it has cost the others, seconds; when it returns, run seconds, and with which
        # exchanges; how often it was left out.
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
        """Return the plan without a slow worker, with the best settings for the others; None if it does not pay.

        To be called after each measurement of the exchanges.

        Args:
            plan: The plan of all workers, with the settings that are best for them.
            now_s: Run second.
            without: Returns the plan without some devices; None if there is none.
        """
        elapsed_s, self._measured_s = now_s - self._measured_s, now_s
        together = self._exchanges.score(plan)
        costs_s: dict[frozenset[str], float] = {}
        for number in self._suspects(plan):
            devices = devices_of(plan.pipelines[number])
            others = without(devices)
            if others is None or self._exchanges.least(others) > (1 - LEAST_GAIN) * together:
                continue
            score, others = self._exchanges.best(others)
            if score > (1 - LEAST_GAIN) * together:
                continue
            costs_s[devices] = self._cost_s.get(devices, 0.0) + elapsed_s * (1 - score / together)
            return_s = self._return_s(plan, others)
            if costs_s[devices] >= return_s:
                times = self._times[devices] = self._times.get(devices, 0) + 1
                self._until_s[devices] = now_s + 2 ** (times - 1) * len(plan.pipelines) * return_s
                self._together[devices] = plan.synchronisation
                self._cost_s = {}
                return others
        self._cost_s = costs_s
        return None

    def _suspects(self, plan: Plan) -> list[int]:
        """Return the workers with the slowest paths from and to all others, as numbers of pipelines."""
        if len(plan.pipelines) < 2:
            return []
        between_s = self._exchanges.times(plan).between_s
        own_s = between_s.sum(axis=0) + between_s.sum(axis=1)
        return [int(number) for number in np.argsort(-own_s, kind="stable")[:_SUSPECTS]]

    def _return_s(self, plan: Plan, others: Plan) -> float:
        """Return the seconds that the return of a worker to ``others`` takes from them, at the rates seen last."""
        held = {device: layers_of(others, device) for device in others.devices}
        moves = worker_moves(held, others, plan, self._scenario)
        move_s = migration_time_s(moves, self._scenario) * float(self._exchanges.factors(plan).max(initial=1.0))
        longer_s = max(0.0, self._exchanges.step_s(plan) - self._exchanges.step_s(others))
        return move_s + (DECISION_LAG_STEPS + 2 * measured_steps(plan.synchronisation.interval_steps)) * longer_s
