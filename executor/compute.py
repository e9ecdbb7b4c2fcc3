"""What a rank computes with, and the paced way: every action lasts what the profile says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from executor.clock import RunClock
from planner.gradient_sync import GradientSync
from planner.plan import Plan
from planner.program import DeviceProgram, Work


@dataclass(frozen=True, slots=True)
class Performed:
    """An action that was carried out.

    Attributes:
        outputs: Payloads for its sends.
        start_s: When the device began, run seconds.
        end_s: When it was done, run seconds.
    """

    outputs: list[torch.Tensor]
    start_s: float
    end_s: float


class Compute(Protocol):
    """Carries out the work of one rank. Payloads are one-dimensional uint8 tensors."""

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Prepare for a step."""

    def run(self, work: Work, inputs: Sequence[torch.Tensor], *, waited: bool) -> Performed:
        """Carry out one action.

        Args:
            work: The action.
            inputs: Payloads of ``work.receives``.
            waited: Whether the device stood idle for one of them.
        """

    def gradient(self, sync: GradientSync) -> torch.Tensor:
        """Return the gradient to be summed: float32, shape (sync.elements,)."""

    def put_gradient(self, sync: GradientSync, gradient: torch.Tensor) -> None:
        """Take the summed gradient back."""

    def finish_step(self) -> float | None:
        """Update the parameters; return this rank's part of the step's loss, if it has one."""


class PacedCompute:
    """Moves tensors of the true sizes and sleeps for the profiled times.

    A sleep ends a little late, by a tenth of a millisecond or more on a busy machine. That is this process's
    lateness and not the device's: an action ends when it should have, and where the device did not stand idle
    the next one begins then. Lateness in receiving stays in, as the time of waiting.
    """

    def __init__(self, clock: RunClock) -> None:
        self._clock = clock
        self._due_s = 0.0
        self._blank = torch.zeros(0, dtype=torch.uint8)

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Prepare for a step: make a buffer that every send can read from."""
        sizes = (transfer.size_bytes for work in program.work for transfer in work.sends)
        largest = max(sizes, default=0)
        if largest > self._blank.numel():
            self._blank = torch.zeros(largest, dtype=torch.uint8)

    def run(self, work: Work, inputs: Sequence[torch.Tensor], *, waited: bool) -> Performed:
        """Sleep for the action's profiled duration."""
        start_s = self._clock.now_s() if waited else self._due_s
        self._due_s = start_s + work.duration_s
        self._clock.sleep_until(self._due_s)
        return Performed([self._blank[: transfer.size_bytes] for transfer in work.sends], start_s, self._due_s)

    def gradient(self, sync: GradientSync) -> torch.Tensor:
        """Return zeros in place of a gradient."""
        return torch.zeros(sync.elements)

    def put_gradient(self, sync: GradientSync, gradient: torch.Tensor) -> None:
        """Drop the sum; the device has been waiting for it."""
        self._due_s = self._clock.now_s()

    def finish_step(self) -> float | None:
        """Nothing is trained, so there is no loss."""
        return None
