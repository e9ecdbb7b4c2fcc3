"""Paced compute: a rank sleeps for the profiled time of each action instead of computing."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from executor.core.clock import RunClock
from executor.core.step_program import DeviceProgram, StepProgram, Work
from executor.training.flat_state import FlatParameters, TiedCopies
from planner.adapt.migration import LayerTransfer
from planner.cost.collectives import Exchange
from planner.cost.device_speed import DeviceSpeed, device_speed, jitter_factors
from planner.cost.synchronisation import GradientSync
from planner.plan.plan import Plan
from planner.scenario.effects import ComputeEffects
from planner.scenario.training import FLOAT32_BYTES


@dataclass(frozen=True, slots=True)
class Performed:
    """The outputs of an action, one payload per message to send, and its start and end in run seconds."""

    outputs: list[torch.Tensor]
    start_s: float
    end_s: float


class GradientParts:
    """Gradients of consecutive layers while parts of them are exchanged with other devices and summed.

    Attributes:
        values: One-dimensional float32 tensor on the CPU.
    """

    def __init__(self, rows: FlatParameters | TiedCopies) -> None:
        self._rows = rows
        self.values = rows.gradients()

    def part(self, exchange: Exchange) -> torch.Tensor:
        """Return what an exchange sends, as bytes: a copy, since a later round may change the values meanwhile."""
        return self.values[slice(*exchange.send)].clone().view(torch.uint8)

    def put(self, exchange: Exchange, payload: torch.Tensor) -> None:
        """Add what an exchange has received to the values, or replace them by it, as the exchange says."""
        received = payload.view(self.values.dtype)
        if exchange.adds:
            self.values[slice(*exchange.receive)] += received
        else:
            self.values[slice(*exchange.receive)] = received

    def end(self) -> None:
        """Replace the gradients of the layers by the values, which are their sum after the last exchange."""
        self._rows.put_gradients(self.values)


class NoGradients:
    """Sends zeros, which take no memory, in place of the gradients of `GradientParts`."""

    def part(self, exchange: Exchange) -> torch.Tensor:
        """Return as many zeros as an exchange sends."""
        return torch.zeros(1, dtype=torch.uint8).expand(exchange.send_elements * FLOAT32_BYTES)

    def put(self, exchange: Exchange, payload: torch.Tensor) -> None:
        """Ignore what an exchange has received."""

    def end(self) -> None:
        """Ignore the sum."""


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


# The largest share of an action's duration by which its sleep is shortened, to make up for earlier, late sleeps.
_MOST_SHORTENED = 0.5

# The most lateness that is made up for, in seconds: after a longer stop of the machine, time goes on from there.
MOST_LATE_S = 0.1


class PacedCompute:
    """Returns tensors of zeros with the sizes that training would have, and sleeps for the profiled times.

    A sleep ends a tenth of a millisecond late, or later on a busy machine. Each action is due at the end of its
    profiled time from the moment at which the previous action was due or, if later, its inputs arrived. After a late
    action the next one therefore sleeps for a shorter time, by at most `_MOST_SHORTENED`. All times that are reported
    are readings of the clock.

    Args:
        effects: The stragglers, slow-downs and jitter that change the profiled times, as in the simulator.
    """

    def __init__(self, clock: RunClock, effects: ComputeEffects) -> None:
        self._clock = clock
        self._effects = effects
        self._speed = DeviceSpeed()
        self._due_s = 0.0
        self._ended_s = 0.0
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

    def start_step(self, current: StepProgram) -> None:
        """Allocate a buffer as large as the largest payload of the step, and draw the jitter of its actions."""
        step, program = current.step, current.program
        self._program = program
        self._speed = device_speed(self._effects, (program.device, *program.partners))
        self._factors = np.ones(program.step_actions)
        if self._effects.jitter > 0:
            self._factors = jitter_factors(self._effects.seed, step, program.step_actions, self._effects.jitter)
        largest = max((transfer.size_bytes for work in program.work for transfer in work.sends), default=0)
        if largest > self._zeros.numel():
            self._zeros = torch.zeros(largest, dtype=torch.uint8)

    def passes(self) -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def run(
        self, work: Work, inputs: Sequence[torch.Tensor], *, ready_s: float, complete: Callable[[int], None]
    ) -> Performed:
        """Sleep for the action's profiled duration, at the device's present speed."""
        start_s = max(ready_s, self._ended_s)
        planned_s = max(ready_s, self._due_s, start_s - MOST_LATE_S)
        factor = float(self._factors[work.number])
        for each in work.completes:
            self._clock.sleep_until(self._speed.end_s(planned_s, factor * each.after_s))
            complete(each.sync)
        self._end(start_s, planned_s, factor * work.duration_s)
        return Performed([self._zeros[: transfer.size_bytes] for transfer in work.sends], start_s, self._ended_s)

    def _end(self, start_s: float, planned_s: float, duration_s: float) -> None:
        """Sleep until the end of an action that has begun at ``start_s``, and should have begun at ``planned_s``."""
        self._due_s = self._speed.end_s(planned_s, duration_s)
        self._clock.sleep_until(max(self._due_s, start_s + (1 - _MOST_SHORTENED) * (self._due_s - planned_s)))
        self._ended_s = self._clock.now_s()

    @property
    def late_s(self) -> float:
        """How much later than due the last action ended, seconds."""
        return self._ended_s - self._due_s

    def begin_sum(self, sync: GradientSync) -> NoGradients:
        """Return zeros in place of gradients."""
        return NoGradients()

    def wait_until(self, time_s: float) -> None:
        """Let the next action begin at run second ``time_s`` at the earliest."""
        self._due_s = max(self._due_s, time_s)
        self._ended_s = max(self._ended_s, time_s)

    def flat_parameters(self, first_layer: int, end_layer: int, elements: int) -> LayerParameters:
        """Return zeros in place of gradients and parameters."""
        return _Zeros(elements)

    def free_s(self) -> float:
        """Return the run second at which the last action ended."""
        return self._ended_s

    def clear_gradients(self) -> None:
        """Do nothing, since there are no gradients."""

    def squared_norm(self) -> float:
        """Return 0, the norm of zeros."""
        return 0.0

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Sleep for the profiled time of the optimizer's update; return None, since there is no loss.

        ``squared_norm``, the sum of the squares of all gradients, changes nothing.
        """
        if self._program.update_s:
            factor = float(self._factors[self._program.update_number])
            self._end(self._ended_s, self._due_s, factor * self._program.update_s)
        return None
