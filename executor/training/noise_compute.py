"""Real compute that measures the noise of the gradient, for Cannikin's noise scale."""

import torch

from executor.core.clock import RunClock
from executor.core.program import DeviceProgram
from executor.training.models.loading import LoadedModel
from executor.training.noise_files import LocalNorms
from executor.training.real_compute import RealCompute
from executor.training.tensor_parallel.layers import RankGroup
from planner.cost.allreduce import GradientSync
from planner.plan.actions import Kind
from planner.plan.plan import Plan
from planner.scenario.scenario import Training


class NoiseMeasuringCompute(RealCompute):
    """A device that holds the whole model, and notes its gradient's norm before and after the sum with the others.

    Nothing is sent for it: what the ranks note comes together when the run is over. Arguments are those of
    `RealCompute`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        program: DeviceProgram | None,
        training: Training,
        clock: RunClock,
        device: torch.device,
        group: RankGroup | None,
    ) -> None:
        super().__init__(loaded, plan, program, training, clock, device, group)
        self._leads = group is None or group.leads
        self._global_batch = training.global_batch
        self._samples = 0
        self._own_squared_norm: float | None = None
        self._norms: list[LocalNorms] = []

    @property
    def norms(self) -> list[LocalNorms]:
        """What was noted in each step; nothing on the partners in a tensor-parallel group, who would note the same."""
        return self._norms if self._leads else []

    def start_step(self, step: int, plan: Plan, program: DeviceProgram) -> None:
        """Begin a step."""
        super().start_step(step, plan, program)
        self._samples = sum(work.end - work.first for work in program.work if work.action.kind is Kind.FORWARD)
        self._own_squared_norm = None

    def gradient(self, sync: GradientSync) -> torch.Tensor:
        """Return the gradients of the layers of ``sync``; those of all layers are measured before the first sum."""
        if self._own_squared_norm is None:
            self._own_squared_norm = self.squared_norm()
        return super().gradient(sync)

    def finish_step(self, step: int, squared_norm: float | None) -> float | None:
        """Measure the summed gradients before they are clipped by ``squared_norm``, and update the parameters."""
        if self._own_squared_norm is not None and self._samples:
            # What a device holds before the sum is its samples' part of the mean over all: (b/B) times their own mean.
            weight = self._global_batch / self._samples
            own = self._own_squared_norm * weight**2
            self._norms.append(LocalNorms(step, self._samples, own, self.squared_norm()))
        return super().finish_step(step, squared_norm)
