"""Which program a rank carries out in each step of an epoch: of steps between which no layers change devices."""

from collections.abc import Callable

from executor.core.messages import NewPlan
from executor.core.step_program import DeviceProgram, StepProgram
from executor.rank.control_client import ControlClient
from planner.plan.plan import Plan


class StepSource:
    """Knows a device's program in each step of one epoch.

    Args:
        program_of: Gives the device's program under a plan.
        first: The first step of the epoch.
        plan: The plan of the first step, and of all steps if nobody steers.
        steps: Number of training steps of the whole run.
        client: Knows the plans that a policy decides on; None if nobody steers.
    """

    def __init__(
        self,
        program_of: Callable[[Plan], DeviceProgram],
        first: int,
        plan: Plan,
        steps: int,
        client: ControlClient | None,
    ) -> None:
        self._program_of = program_of
        self.first = first
        self._plan = plan
        self.steps = steps
        self._client = client

    def known(self, step: int) -> StepProgram | None:
        """Return a step if its plan is known already; None after the last one of this epoch."""
        plan = NewPlan(self._plan) if self._client is None else self._client.known(step)
        if step >= self.steps or plan is None or begins_another(plan, step, self.first):
            return None
        return self._under(plan, step)

    def is_decided(self, step: int) -> bool:
        """Return whether it is known what a step runs, in whichever epoch."""
        return self._client is None or self._client.known(step) is not None

    def wait(self, step: int) -> StepProgram | NewPlan:
        """Return a step once its plan is known; the plan alone if it begins another epoch."""
        assert self._client is not None, "where nobody steers every step is known"
        plan = self._client.wait(step)
        return plan if begins_another(plan, step, self.first) else self._under(plan, step)

    def _under(self, plan: NewPlan, step: int) -> StepProgram:
        return StepProgram(step, plan.plan, self._program_of(plan.plan))


def begins_another(plan: NewPlan, step: int, first: int) -> bool:
    """Return whether a step begins another epoch than the one that began with ``first``."""
    return plan.moves is not None and step > first
