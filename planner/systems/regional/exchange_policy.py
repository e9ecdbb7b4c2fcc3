"""Policy ``auto`` for every method of synchronisation."""

from planner.adapt.observation import Observation
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.auto.policy import AutoPolicy
from planner.systems.deepcee.observed_paths import learn_slowdowns
from planner.systems.regional.exchange_settings import ExchangeSettings
from planner.systems.regional.slow_workers import SlowWorkers
from planner.systems.regional.worker_shares import WorkerShares


class AnyMethodPolicy(AutoPolicy):
    """The policy ``auto``: `AutoPolicy` for sums of gradients; for outer steps who takes part, and what is exchanged.

    Without a law of the task's loss the settings of exchanges stay, and no worker is left out but those that are away.
    Each run needs an object of its own.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        law = scenario.training.convergence
        self._workers = WorkerShares(scenario)
        self._slowdown: dict[str, float] = {}
        self._slow = None if law is None else SlowWorkers(scenario, ExchangeSettings(scenario, law))

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan to use from the next step on, or None to keep ``plan``."""
        if not plan.synchronisation.has_outer_step:
            return super().decide(observation, plan)
        self.thinking_s = 0.0
        learn_slowdowns(self._slowdown, observation, self._scenario)
        left_out = frozenset[str]() if self._slow is None else self._slow.devices(observation.end_s)
        with_others = self._workers.decide(observation, plan, self._slowdown, left_out)
        if self._slow is None:
            return with_others
        if with_others is not None or observation.gone:
            return None if with_others is None else self._slow.with_exchanges(with_others)
        exchanges = self._slow.exchanges
        decided = exchanges.decide(observation, plan, self._slowdown)
        if exchanges.measured_s:
            away = {*observation.away, *left_out}

            def without(devices: frozenset[str]) -> Plan | None:
                return self._workers.without(plan, away | devices, self._slowdown)

            decided = self._slow.leave(decided or plan, observation.end_s, without) or decided
        self.thinking_s = exchanges.thinking_s
        return decided
