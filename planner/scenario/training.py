"""How the learning rate changes over the steps of a run."""

import math
from dataclasses import dataclass

from traces.common.errors import InputError
from traces.common.names import find_by_name

SHAPES = ("constant", "linear", "cosine")

_STEADY = "constant"


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """A linear warm-up, then a shape; a function of the step alone, so that a run can go on from any step.

    Attributes:
        shape: One of `SHAPES`: what follows the warm-up.
        warmup_steps: The rate rises over so many steps, to its full value in the step after them.
        decay_steps: Steps after the warm-up over which ``linear`` and ``cosine`` fall.
        final_share: Of the full rate, what they fall to and stay at, 0 to 1.

    Raises:
        InputError: There is no such shape, or a value is out of range.
    """

    shape: str = _STEADY
    warmup_steps: int = 0
    decay_steps: int = 0
    final_share: float = 0.0

    def __post_init__(self) -> None:
        find_by_name(self.shape, dict.fromkeys(SHAPES), "shape", where="shape")
        if self.warmup_steps < 0:
            raise InputError(f"{self.warmup_steps} steps of warm-up", "warmup_steps", "0 or more")
        if self.decay_steps < 0 or (self.shape != _STEADY and not self.decay_steps):
            falls = "0 or more" if self.shape == _STEADY else f"shape '{self.shape}' falls over 1 step or more"
            raise InputError(f"{self.decay_steps} steps of decay", "decay_steps", falls)
        if not 0 <= self.final_share <= 1:
            raise InputError(f"a final share of {self.final_share:g}", "final_share", "of the full rate: 0 to 1")

    def factor(self, step: int) -> float:
        """Return the share of the full learning rate in a step, which counts from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.shape == _STEADY:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        falling = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_share + (1 - self.final_share) * falling
