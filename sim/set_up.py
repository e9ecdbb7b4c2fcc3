"""With what steps of one set-up begin: the plan, and layers that are still on their way."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.adapt.migration import LayerTransfer
from planner.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Epoch:
    """The beginning of a world.

    Attributes:
        plan: Of the first step.
        first_step: Its index.
        moves: What travels before it; who needs none of it begins at once.
        ready_s: When each device is done with what was before, seconds from the start of the run.
        earliest_s: When devices of which nothing is known could begin, in the same seconds.
    """

    plan: Plan
    first_step: int = 0
    moves: tuple[LayerTransfer, ...] = ()
    ready_s: Mapping[str, float] = field(default_factory=dict)
    earliest_s: float = 0.0

    def ready_at_s(self, device: str) -> float:
        """Return when a device can begin to send or to compute, seconds from the start of the run."""
        return self.ready_s.get(device, self.earliest_s)
