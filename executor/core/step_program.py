"""What a rank does in a step."""

from dataclasses import dataclass

from executor.core.program import DeviceProgram
from planner.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A rank's program of a step, under the step's plan."""

    step: int
    plan: Plan
    program: DeviceProgram
