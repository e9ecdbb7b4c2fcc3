"""Paced compute, in which every action lasts as long as the profile says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from executor.core.clock import RunClock
from executor.core.step_program import DeviceProgram, Work
from executor.training.flat_state import FlatParameters
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


# Gradients and parameters of consecutive layers, each as a one-dimensional float32 tensor on the CPU.
LayerParameters = FlatParameters | _Zeros


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
