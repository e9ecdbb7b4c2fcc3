"""The simulator as a backend: the same plan and policy as a real run, in a model of the cluster."""

from planner.adaptation import Adaptation
from planner.backend import RunRecord
from planner.check import check_plan
from planner.checks.trace_length import check_traces_last
from planner.plan import Plan
from planner.policy import Policy
from planner.scenario import Scenario
from sim.foreseen import fault_events
from sim.world import World
from traces.errors import RunError


class Simulator:
    """Runs plans in simulated time. Deterministic: the same inputs give the same events."""

    def run(self, scenario: Scenario, plan: Plan, policy: Policy | None, steps: int) -> RunRecord:
        """Simulate ``steps`` training steps.

        Raises:
            InputError: The scenario cannot carry out the plan.
            RunError: A link stays at rate zero for ever, or a device never returns, and others wait for it.
        """
        check_plan(plan, scenario)
        check_traces_last(scenario, plan, steps)
        adaptation = Adaptation(policy, plan, scenario) if policy is not None else None
        world = World(scenario, plan, adaptation, steps)
        world.run()
        if world.unfinished_actors:
            raise RunError(
                f"the run stalls at {world.now_s:.3f} s: {', '.join(world.waiting)} wait for bytes that "
                "never arrive; does a link stay at rate zero, or a device never return?"
            )
        _refuse_ended_traces(world, scenario)
        for event in (*world.updates, *fault_events(scenario, world.now_s)):
            world.recorder.add(event)
        decisions = tuple(adaptation.decisions) if adaptation is not None else ()
        return RunRecord("simulated", scenario, plan, world.recorder.log(), decisions)


def _refuse_ended_traces(world: World, scenario: Scenario) -> None:
    """What happened after a trace ended is made up: such a run is none."""
    used = {link.name for route in world.network.routes for link in route.path}
    for link in scenario.cluster.links:
        trace = link.trace
        if link.name in used and trace is not None and trace.ends and trace.duration_s < world.now_s:
            raise RunError(
                f"the run lasts {world.now_s:.3f} s, but the trace of link {link.name} ends at {trace.duration_s:g} s: "
                "let it loop, give a longer one, or run fewer steps"
            )
