"""What is known of a run while it goes on, step by step."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A step that all devices have finished.

    Attributes:
        step: Index.
        steps: Of the run.
        end_s: When the last device finished it, seconds of the run.
        step_s: Since the step before was finished, seconds.
        samples: Of the step.
        loss: Mean over its samples; None where nothing is trained.
        change: What the policy decided when it had seen the step; empty for nothing.
        away: Devices whose processes are not there.
    """

    step: int
    steps: int
    end_s: float
    step_s: float
    samples: int
    loss: float | None
    change: str
    away: tuple[str, ...]

    @property
    def samples_per_s(self) -> float:
        """Of this step alone."""
        return self.samples / self.step_s if self.step_s > 0 else 0.0

    def text(self) -> str:
        """Return a line for people."""
        words = [f"step {self.step + 1} of {self.steps}: {self.step_s:.3g} s, {self.samples_per_s:.4g} samples/s"]
        if self.loss is not None:
            words.append(f"loss {self.loss:.4f}")
        if self.change:
            words.append(f"decided: {self.change}")
        if self.away:
            words.append(f"away: {', '.join(self.away)}")
        return ", ".join(words)


Watch = Callable[[Progress], None]
