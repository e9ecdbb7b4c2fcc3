"""Real compute that measures norms of gradients before and after their sum, for Cannikin's gradient noise scale."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from executor.core.job import JobFolder
from executor.core.step_program import StepProgram
from executor.training.compute import GradientParts
from executor.training.optimizer import squared_norm
from executor.training.real_compute import RealCompute
from planner.adapt.gradient_noise import LocalNorms, has_local_norms
from planner.cost.synchronisation import GradientSync
from planner.plan.actions import Kind


def write_norms(norms: Iterable[LocalNorms], job: JobFolder, rank: int) -> None:
    """Write the norms that a rank has measured."""
    job.of_rank("norms", rank).write_text("".join(json.dumps(asdict(each)) + "\n" for each in norms))


class NoiseMeasuringCompute(RealCompute):
    """Measures the norm of a rank's gradient before and after the sum over all ranks, each of which has all layers.

    Nothing is measured in steps of other plans. The ranks exchange no messages for it: their norms are gathered after
    the run, and a policy gets them with the rows of the step. Arguments are those of `RealCompute`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._samples = 0
        self._global_batch = 0
        self._own_squared_norm = 0.0
        self._norms: list[LocalNorms] = []

    @property
    def norms(self) -> list[LocalNorms]:
        """The norms of each step; empty on all but the first device of a tensor-parallel group, which has the same."""
        return self._norms if self._leads else []

    def start_step(self, current: StepProgram) -> None:
        """Begin a step, and forget the norm of the previous step."""
        super().start_step(current)
        work = current.program.work if has_local_norms(current.plan) else ()
        self._samples = sum(each.end - each.first for each in work if each.action.kind is Kind.FORWARD)
        self._global_batch = current.plan.global_batch
        self._own_squared_norm = 0.0

    def begin_sum(self, sync: GradientSync) -> GradientParts:
        """Return the gradients of the layers of ``sync``, and measure them: every layer is in one sum of the step."""
        parts = super().begin_sum(sync)
        if self._samples:
            self._own_squared_norm += squared_norm([parts.values])
        return parts

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Measure the summed gradients before they are clipped by ``squared_norm``, and update the parameters."""
        if self._samples:
            # Before the sum a device's gradient is b/B times the mean over its b samples, in a global batch of B.
            weight = self._global_batch / self._samples
            own = self._own_squared_norm * weight**2
            self._norms.append(LocalNorms(step, self._samples, own, self.squared_norm()))
        return super().finish_step(step, squared_norm)
