"""How the learning rate changes over the steps of a run."""

import math
from dataclasses import dataclass

SHAPES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """A linear warm-up, then a shape; a function of the step alone, so that a run can go on from any step.

    Attributes:
        shape: One of `SHAPES`: what follows the warm-up.
        warmup_steps: The rate rises over so many steps, to its full value in the step after them.
        decay_steps: Steps after the warm-up over which ``linear`` and ``cosine`` fall.
        final_share: Of the full rate, what they fall to and stay at.
    """

    shape: str = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    final_share: float = 0.0

    def factor(self, step: int) -> float:
        """Return the share of the full learning rate in a step, which counts from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.shape == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / self.decay_steps) if self.decay_steps else 1.0
        falling = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.final_share + (1 - self.final_share) * falling
