"""Real compute that measures norms of gradients before and after their sum, for Cannikin's gradient noise scale."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from executor.core.job import JobFolder
from executor.core.step_program import DeviceProgram
from executor.training.compute import GradientParts
from executor.training.real_compute import RealCompute
from planner.cost.synchronisation import GradientSync
from planner.plan.actions import Kind
from planner.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class LocalNorms:
    """One device's part of `GradientNorms`, in squared units of the gradient.

    Attributes:
        samples: b_i, the number of samples of the device.
        local_squared_norm: |g_i|², squared norm of the mean gradient of these samples.
        global_squared_norm: |g|², squared norm of the mean gradient of all samples of the step.
    """

    step: int
    samples: int
    local_squared_norm: float
    global_squared_norm: float


def write_norms(norms: Iterable[LocalNorms], job: JobFolder, rank: int) -> None:
    """Write the norms that a rank has measured."""
    job.of_rank("norms", rank).write_text("".join(json.dumps(asdict(each)) + "\n" for each in norms))


class NoiseMeasuringCompute(RealCompute):
    """Measures the norm of a rank's gradient before and after the sum over all ranks, each of which has all layers.

    The norms of all ranks are gathered after the run, without messages. Arguments are those of `RealCompute`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._samples = 0
        self._own_squared_norm: float | None = None
        self._norms: list[LocalNorms] = []

    @property
    def norms(self) -> list[LocalNorms]:
        """The norms of each step; empty on all but the first device of a tensor-parallel group, which has the same."""
        return self._norms if self._leads else []

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Begin a step, and forget the norm of the previous step."""
        super().start_step(step, plan, program)
        self._samples = sum(work.end - work.first for work in program.work if work.action.kind is Kind.FORWARD)
        self._own_squared_norm = None

    def begin_sum(self, sync: GradientSync) -> GradientParts:
        """Return the gradients of the layers of ``sync``; before the first sum, measure those of all layers."""
        if self._own_squared_norm is None:
            self._own_squared_norm = self.squared_norm()
        return super().begin_sum(sync)

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Measure the summed gradients before they are clipped by ``squared_norm``, and update the parameters."""
        if self._own_squared_norm is not None and self._samples:
            # Before the sum a device's gradient is b/B times the mean over its b samples, in a global batch of B.
            weight = self._training.global_batch / self._samples
            own = self._own_squared_norm * weight**2
            self._norms.append(LocalNorms(step, self._samples, own, self.squared_norm()))
        return super().finish_step(step, squared_norm)
