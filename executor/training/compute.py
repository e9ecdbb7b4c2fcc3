"""What a rank computes with, and the paced way: every action lasts what the profile says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from executor.core.clock import RunClock
from executor.core.step_program import DeviceProgram, Work
from planner.adapt.migration import LayerTransfer
from planner.cost.synchronisation import GradientSync
from planner.plan.plan import Plan


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


class Rows(Protocol):
    """Gradients and parameters of consecutive layers, each as one row: float32, one-dimensional, on the CPU."""

    def gradients(self) -> torch.Tensor:
        """Return a copy of the gradients."""

    def add_gradients(self, row: torch.Tensor) -> None:
        """Add to the gradients."""

    def parameters(self) -> torch.Tensor:
        """Return a copy of the parameters."""

    def put_parameters(self, row: torch.Tensor) -> None:
        """Replace the parameters."""


class Compute(Protocol):
    """Carries out the work of one rank. Payloads are one-dimensional uint8 tensors."""

    def hold(self, plan: Plan, program: DeviceProgram | None) -> None:
        """Take up the layers of another plan; those that this rank had already keep their state.

        Args:
            plan: Of the steps to come.
            program: This rank's; None if it has none in that plan.
        """

    def state_bytes(self, move: LayerTransfer) -> int:
        """Return the bytes of the state of the layers of ``move``."""

    def layer_state(self, move: LayerTransfer) -> torch.Tensor:
        """Return a copy of the state of these layers, which this rank holds."""

    def put_layer_state(self, move: LayerTransfer, state: torch.Tensor) -> None:
        """Replace the state of these layers, which this rank holds."""

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Prepare for a step."""

    def run(
        self, work: Work, inputs: Sequence[torch.Tensor], *, ready_s: float, complete: Callable[[int], None]
    ) -> Performed:
        """Carry out one action.

        Args:
            work: The action.
            inputs: Payloads of ``work.receives``.
            ready_s: When everything that it needs of others was there, run seconds.
            complete: Told which of the program's sums may begin, for each of ``work.completes``.
        """

    def gradient(self, sync: GradientSync) -> torch.Tensor:
        """Return the gradient to be summed: float32, shape (sync.elements,)."""

    def put_gradient(self, sync: GradientSync, gradient: torch.Tensor) -> None:
        """Take the summed gradient back."""

    def wait_until(self, time_s: float) -> None:
        """Take note that the device had nothing to do before this second of the run."""

    def rows(self, first_layer: int, end_layer: int, elements: int) -> Rows:
        """Return the rows of some of this rank's layers, which hold so many numbers."""

    def free_s(self) -> float:
        """Return when the device has done what it was given, run seconds."""

    def clear_gradients(self) -> None:
        """Forget all gradients."""

    def squared_norm(self) -> float:
        """Return the squared Euclidean norm of this rank's gradients as they are now."""

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Update the parameters; return this rank's part of the step's loss, if it has one.

        Args:
            step: That ends; the learning rate follows it.
            squared_norm: Of the summed gradients of all layers of the model, by which they are clipped; None where
                they are not.
        """


class BlankRows:
    """Zeros in place of gradients and parameters."""

    def __init__(self, elements: int) -> None:
        self._elements = elements

    def gradients(self) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(self._elements)

    def add_gradients(self, row: torch.Tensor) -> None:
        """Drop them."""

    def parameters(self) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(self._elements)

    def put_parameters(self, row: torch.Tensor) -> None:
        """Drop them."""


class PacedCompute:
    """Moves tensors of the true sizes and sleeps for the profiled times.

    A sleep ends a little late, by a tenth of a millisecond or more on a busy machine. That is this process's
    lateness and not the device's: an action begins when the one before it should have ended or, if that is later,
    when its inputs were there. Lateness in receiving stays in, as a later arrival.
    """

    def __init__(self, clock: RunClock) -> None:
        self._clock = clock
        self._due_s = 0.0
        self._update_s = 0.0
        self._blank = torch.zeros(0, dtype=torch.uint8)

    def hold(self, plan: Plan, program: DeviceProgram | None) -> None:
        """Nothing is held."""

    def state_bytes(self, move: LayerTransfer) -> int:
        """Return what the plan says."""
        return move.size_bytes

    def layer_state(self, move: LayerTransfer) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(move.size_bytes, dtype=torch.uint8)

    def put_layer_state(self, move: LayerTransfer, state: torch.Tensor) -> None:
        """Drop it."""

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Prepare for a step: make a buffer that every send can read from."""
        self._update_s = program.update_s
        sizes = (transfer.size_bytes for work in program.work for transfer in work.sends)
        largest = max(sizes, default=0)
        if largest > self._blank.numel():
            self._blank = torch.zeros(largest, dtype=torch.uint8)

    def run(
        self, work: Work, inputs: Sequence[torch.Tensor], *, ready_s: float, complete: Callable[[int], None]
    ) -> Performed:
        """Sleep for the action's profiled duration."""
        start_s = max(ready_s, self._due_s)
        for each in work.completes:
            self._clock.sleep_until(start_s + each.after_s)
            complete(each.sync)
        self._due_s = start_s + work.duration_s
        self._clock.sleep_until(self._due_s)
        return Performed([self._blank[: transfer.size_bytes] for transfer in work.sends], start_s, self._due_s)

    def gradient(self, sync: GradientSync) -> torch.Tensor:
        """Return zeros in place of a gradient."""
        return torch.zeros(sync.elements)

    def put_gradient(self, sync: GradientSync, gradient: torch.Tensor) -> None:
        """Drop the sum."""

    def wait_until(self, time_s: float) -> None:
        """Begin nothing before that."""
        self._due_s = max(self._due_s, time_s)

    def rows(self, first_layer: int, end_layer: int, elements: int) -> Rows:
        """Return rows of zeros."""
        return BlankRows(elements)

    def free_s(self) -> float:
        """Return when the last action should have ended."""
        return self._due_s

    def clear_gradients(self) -> None:
        """There are none."""

    def squared_norm(self) -> float:
        """Return the norm of gradients of zeros."""
        return 0.0

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Sleep for the profiled time of an update, after a wait if there is a ``squared_norm``; nothing has a loss."""
        if squared_norm is not None:
            self._due_s = max(self._due_s, self._clock.now_s())
        self._due_s += self._update_s
        self._clock.sleep_until(self._due_s)
        return None
