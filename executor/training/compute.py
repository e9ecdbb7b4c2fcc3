"""The interface of a rank's compute, and paced compute, in which every action lasts as long as the profile says."""

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
        start_s: When the device began, run seconds.
        end_s: When the device was done, run seconds.
    """

    outputs: list[torch.Tensor]
    start_s: float
    end_s: float


class LayerParameters(Protocol):
    """Gradients and parameters of consecutive layers, each as a one-dimensional float32 tensor on the CPU."""

    def gradients(self) -> torch.Tensor:
        """Return a copy of the gradients."""

    def add_gradients(self, values: torch.Tensor) -> None:
        """Add to the gradients."""

    def parameters(self) -> torch.Tensor:
        """Return a copy of the parameters."""

    def put_parameters(self, values: torch.Tensor) -> None:
        """Replace the parameters."""


class Compute(Protocol):
    """Carries out the work of one rank. Payloads are one-dimensional uint8 tensors."""

    def set_plan(self, plan: Plan, program: DeviceProgram | None) -> None:
        """Take the layers of another plan, if this rank has a program in it; layers that it had keep their state."""

    def state_bytes(self, move: LayerTransfer) -> int:
        """Return the bytes of the state of the layers of ``move``."""

    def layer_state(self, move: LayerTransfer) -> torch.Tensor:
        """Return a copy of the state of the layers of ``move``, which this rank has."""

    def put_layer_state(self, move: LayerTransfer, state: torch.Tensor) -> None:
        """Replace the state of the layers of ``move``, which this rank has."""

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Prepare for a step."""

    def run(
        self, work: Work, inputs: Sequence[torch.Tensor], *, ready_s: float, complete: Callable[[int], None]
    ) -> Performed:
        """Carry out one action.

        Args:
            work: The action to compute.
            inputs: The payloads of ``work.receives``.
            ready_s: When the last of them had arrived, run seconds.
            complete: Called with the index of each gradient sum of ``work.completes`` when its gradients are complete.
        """

    def gradient(self, sync: GradientSync) -> torch.Tensor:
        """Return the gradient to be summed: float32, shape (sync.elements,)."""

    def put_gradient(self, sync: GradientSync, gradient: torch.Tensor) -> None:
        """Replace the gradient by the sum."""

    def wait_until(self, time_s: float) -> None:
        """Note that the device was idle until this second of the run."""

    def flat_parameters(self, first_layer: int, end_layer: int, elements: int) -> LayerParameters:
        """Return access to the ``elements`` gradients and parameters of some of this rank's layers."""

    def free_s(self) -> float:
        """Return when the device has finished its last action, run seconds."""

    def clear_gradients(self) -> None:
        """Drop all gradients."""

    def squared_norm(self) -> float:
        """Return the squared Euclidean norm of this rank's gradients as they are now."""

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Update the parameters; return this rank's part of the step's loss, if it has one.

        Args:
            step: Index of the step, which determines the learning rate.
            squared_norm: Squared norm of the summed gradients of all layers of the model, by which they are clipped;
                None without clipping.
        """


class _Zeros:
    """Zeros in place of gradients and parameters."""

    def __init__(self, elements: int) -> None:
        self._elements = elements

    def gradients(self) -> torch.Tensor:
        return torch.zeros(self._elements)

    def add_gradients(self, values: torch.Tensor) -> None:
        pass

    def parameters(self) -> torch.Tensor:
        return torch.zeros(self._elements)

    def put_parameters(self, values: torch.Tensor) -> None:
        pass


class PacedCompute:
    """Moves tensors of the true sizes, filled with zeros, and sleeps for the profiled times.

    A sleep ends late by a tenth of a millisecond or more on a busy machine. This lateness belongs to the process and
    not to the device: an action begins when the one before it should have ended or, if that is later, when its inputs
    arrived. Lateness in receiving remains, as a later arrival.
    """

    def __init__(self, clock: RunClock) -> None:
        self._clock = clock
        self._due_s = 0.0
        self._update_s = 0.0
        self._zeros = torch.zeros(0, dtype=torch.uint8)

    def set_plan(self, plan: Plan, program: DeviceProgram | None) -> None:
        """Do nothing: there are no layers."""

    def state_bytes(self, move: LayerTransfer) -> int:
        """Return the bytes that the plan gives."""
        return move.size_bytes

    def layer_state(self, move: LayerTransfer) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(move.size_bytes, dtype=torch.uint8)

    def put_layer_state(self, move: LayerTransfer, state: torch.Tensor) -> None:
        """Ignore the state."""

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Make a buffer as large as the largest payload to send."""
        self._update_s = program.update_s
        largest = max((transfer.size_bytes for work in program.work for transfer in work.sends), default=0)
        if largest > self._zeros.numel():
            self._zeros = torch.zeros(largest, dtype=torch.uint8)

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
        return Performed([self._zeros[: transfer.size_bytes] for transfer in work.sends], start_s, self._due_s)

    def gradient(self, sync: GradientSync) -> torch.Tensor:
        """Return zeros in place of a gradient."""
        return torch.zeros(sync.elements)

    def put_gradient(self, sync: GradientSync, gradient: torch.Tensor) -> None:
        """Ignore the sum."""

    def wait_until(self, time_s: float) -> None:
        """Begin no action before this second of the run."""
        self._due_s = max(self._due_s, time_s)

    def flat_parameters(self, first_layer: int, end_layer: int, elements: int) -> LayerParameters:
        """Return zeros in place of gradients and parameters."""
        return _Zeros(elements)

    def free_s(self) -> float:
        """Return when the last action should have ended, run seconds."""
        return self._due_s

    def clear_gradients(self) -> None:
        """Do nothing: there are no gradients."""

    def squared_norm(self) -> float:
        """Return 0, the norm of zeros."""
        return 0.0

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Sleep for the profiled time of an update, which begins now if it had to wait for ``squared_norm``."""
        if squared_norm is not None:
            self._due_s = max(self._due_s, self._clock.now_s())
        self._due_s += self._update_s
        self._clock.sleep_until(self._due_s)
        return None
