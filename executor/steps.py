"""The steps of one rank's run, each under the plan that holds for it."""

from collections.abc import Callable

from executor.clock import RunClock
from executor.control import PlanFeed
from executor.interpreter import Interpreter
from executor.step_program import StepProgram
from planner.plan import Plan
from planner.program import DeviceProgram


class StepSource:
    """Knows a device's program in each step.

    Args:
        program_of: Gives the device's program under a plan.
        plan: Of all steps if nobody feeds others.
        steps: How many there are.
        feed: Gives the plans that a policy decides on; None if there is none.
    """

    def __init__(
        self, program_of: Callable[[Plan], DeviceProgram], plan: Plan, steps: int, feed: PlanFeed | None
    ) -> None:
        self._program_of = program_of
        self._plan = plan
        self.steps = steps
        self._feed = feed

    def known(self, step: int) -> StepProgram | None:
        """Return a step if its plan is known already; None after the last one."""
        plan = self._plan if self._feed is None else self._feed.known(step)
        return None if step >= self.steps or plan is None else self._under(plan, step)

    def wait(self, step: int) -> StepProgram:
        """Return a step, once its plan is known."""
        assert self._feed is not None, "without a feed every step is known"
        return self._under(self._feed.wait(step), step)

    def _under(self, plan: Plan, step: int) -> StepProgram:
        return StepProgram(step, plan, self._program_of(plan))


def run_steps(source: StepSource, interpreter: Interpreter, clock: RunClock) -> None:
    """Carry out all steps.

    Args:
        source: Gives them.
        interpreter: Carries them out.
        clock: Of the run.
    """
    for step in range(source.steps):
        current, ready_s = source.known(step), float("-inf")
        if current is None:
            current = source.wait(step)
            ready_s = clock.now_s()
        if step == 0:
            interpreter.post(current)
            clock.sleep_until(0.0)
            ready_s = clock.now_s()
        interpreter.run(current, source.known, ready_s)
    interpreter.close()
