"""Paced compute: a rank sleeps for the profiled time of each action instead of computing."""

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
    """The outputs of an action, one payload per message to send, and its start and end in run seconds."""

    outputs: list[torch.Tensor]
    start_s: float
    end_s: float


class _Zeros:
    """Zeros in place of the gradients and parameters of a `FlatParameters`."""

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


# Reads and writes the gradients and parameters of consecutive layers, as one-dimensional float32 tensors on the CPU.
LayerParameters = FlatParameters | _Zeros


class PacedCompute:
    """Returns tensors of zeros with the sizes that training would have, and sleeps for the profiled times.

    On a busy machine a sleep ends a tenth of a millisecond late, or more. So that such delays do not add up, an action
    counts as begun when the previous action should have ended or, if later, when its inputs arrived.
    """

    def __init__(self, clock: RunClock) -> None:
        self._clock = clock
        self._due_s = 0.0
        self._update_s = 0.0
        self._zeros = torch.zeros(0, dtype=torch.uint8)

    def set_plan(self, plan: Plan, program: DeviceProgram | None) -> None:
        """Do nothing, since there are no layers."""

    def state_bytes(self, move: LayerTransfer) -> int:
        """Return the planned size of a transfer in bytes."""
        return move.size_bytes

    def layer_state(self, move: LayerTransfer) -> torch.Tensor:
        """Return zeros of the planned size."""
        return torch.zeros(move.size_bytes, dtype=torch.uint8)

    def put_layer_state(self, move: LayerTransfer, state: torch.Tensor) -> None:
        """Ignore the state."""

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Allocate a buffer as large as the largest payload of the step."""
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
        """Ignore the summed gradient."""

    def wait_until(self, time_s: float) -> None:
        """Let the next action begin at run second ``time_s`` at the earliest."""
        self._due_s = max(self._due_s, time_s)

    def flat_parameters(self, first_layer: int, end_layer: int, elements: int) -> LayerParameters:
        """Return zeros in place of gradients and parameters."""
        return _Zeros(elements)

    def free_s(self) -> float:
        """Return the run second at which the last action should have ended."""
        return self._due_s

    def clear_gradients(self) -> None:
        """Do nothing, since there are no gradients."""

    def squared_norm(self) -> float:
        """Return 0, the norm of zeros."""
        return 0.0

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Sleep for the profiled time of the optimizer's update; return None, since there is no loss.

        With a ``squared_norm`` the update begins now, when the norm has arrived; otherwise after the last action.
        """
        if squared_norm is not None:
            self._due_s = max(self._due_s, self._clock.now_s())
        self._due_s += self._update_s
        self._clock.sleep_until(self._due_s)
        return None
