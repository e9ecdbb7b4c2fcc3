"""The simulator as a backend: the same plan and policy as a real run, in a model of the cluster."""

import math

from planner.adapt.adaptation import Adaptation
from planner.adapt.policy import Policy
from planner.check import check_plan
from planner.check.paths import check_traces_last
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from planner.scenario.scenario import Scenario
from sim.run import Run
from sim.step_gate import StopCondition


class Simulator:
    """Runs plans in simulated time. Deterministic: the same inputs give the same events.

    Args:
        duration_s: No step is begun that all could begin only at or after this time, seconds from the start of the
            run: it ends with the steps that are under way then.
    """

    def __init__(self, duration_s: float = math.inf) -> None:
        self._duration_s = duration_s

    def run(self, scenario: Scenario, plan: Plan, policy: Policy | None, steps: int) -> RunRecord:
        """Simulate ``steps`` training steps, or those of the duration if that is shorter.

        Raises:
            InputError: The scenario cannot carry out the plan.
            RunError: A link stays at rate zero for ever, or a device never returns, and others wait for it; or a
                decision cannot be carried out.
        """
        check_plan(plan, scenario)
        if self._duration_s == math.inf:
            check_traces_last(scenario, plan, steps)
        adaptation = Adaptation(policy, plan, scenario) if policy is not None else None
        events = Run(scenario, plan, adaptation, StopCondition(steps, self._duration_s)).run()
        decisions = tuple(adaptation.decisions) if adaptation is not None else ()
        return RunRecord("simulated", scenario, plan, events, decisions)
