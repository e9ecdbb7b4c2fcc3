"""Real compute that measures the noise of the gradient, for Cannikin's noise scale."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from executor.core.clock import RunClock
from executor.core.job import JobFolder
from executor.core.step_program import DeviceProgram
from executor.training.models.loading import LoadedModel
from executor.training.real_compute import RealCompute
from executor.training.tensor_parallel import TensorGroup
from planner.cost.synchronisation import GradientSync
from planner.plan.actions import Kind
from planner.plan.plan import Plan
from planner.runs.gradient_noise import GradientNorms
from planner.scenario.training import Training

# One device alone has nobody to compare with.
_FEWEST_DEVICES = 2


@dataclass(frozen=True, slots=True)
class LocalNorms:
    """One device's part of `GradientNorms`, in squared units of the gradient.

    Attributes:
        step: Index.
        samples: b_i, those that the device took.
        local_squared_norm: |g_i|², of the mean gradient of these samples.
        global_squared_norm: |g|², of the mean gradient of all samples of the step.
    """

    step: int
    samples: int
    local_squared_norm: float
    global_squared_norm: float


def write_norms(norms: Iterable[LocalNorms], job: JobFolder, rank: int) -> None:
    """Write what a rank has noted."""
    job.norms(rank).write_text("".join(json.dumps(asdict(each)) + "\n" for each in norms))


def gather_norms(job: JobFolder, ranks: int) -> tuple[GradientNorms, ...]:
    """Return what all ranks have noted, step by step; nothing where the noise was not measured."""
    by_step: defaultdict[int, list[LocalNorms]] = defaultdict(list)
    for rank in range(ranks):
        for norms in _read(job.norms(rank)):
            by_step[norms.step].append(norms)
    return tuple(_together(step, by_step[step]) for step in sorted(by_step) if len(by_step[step]) >= _FEWEST_DEVICES)


def _read(path: Path) -> Iterator[LocalNorms]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield LocalNorms(**json.loads(line))


def _together(step: int, parts: Sequence[LocalNorms]) -> GradientNorms:
    return GradientNorms(
        step,
        tuple(part.samples for part in parts),
        tuple(part.local_squared_norm for part in parts),
        parts[0].global_squared_norm,
    )


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
        group: TensorGroup | None,
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
