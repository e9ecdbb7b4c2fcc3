"""The simulator as a backend: the same plan and policy as a real run, in a model of the cluster."""

from planner.adaptation import Adaptation
from planner.backend import RunRecord
from planner.check import check_plan
from planner.events import in_order
from planner.plan import Plan
from planner.policy import Policy
from planner.scenario import Scenario
from sim.device import SimulatedDevice
from sim.world import World
from traces.errors import RunError


class Simulator:
    """Runs plans in simulated time. Deterministic: the same inputs give the same events."""

    def run(self, scenario: Scenario, plan: Plan, policy: Policy | None, steps: int) -> RunRecord:
        """Simulate ``steps`` training steps.

        Raises:
            InputError: The scenario cannot carry out the plan.
            RunError: A link stays at rate zero for ever, and devices wait for it.
        """
        check_plan(plan, scenario)
        adaptation = Adaptation(policy, plan, scenario) if policy is not None else None
        world = World(scenario, plan, adaptation)
        running = {
            device: world.environment.process(SimulatedDevice(world, device).run(steps)) for device in plan.devices
        }
        world.environment.run()
        stuck = [device for device, process in running.items() if process.is_alive]
        if stuck:
            raise RunError(
                f"the run stalls at {world.environment.now:.3f} s: {', '.join(stuck)} wait for bytes that never "
                "arrive; does a link stay at rate zero?"
            )
        decisions = tuple(adaptation.decisions) if adaptation is not None else ()
        return RunRecord("simulated", scenario, plan, tuple(in_order(world.events)), decisions)
