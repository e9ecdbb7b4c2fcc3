"""The program of one rank of torch.distributed.pipelining, with which the executor is compared.

`main` runs one rank. In the job's folder `parameters.json` holds a `PipeliningRun`, and each rank writes its
`Measured` to `rank-N.json` there.

Paced stages sleep in autograd functions: one stands for the gradient of the input, one for the gradient of the weights.
If a schedule splits the backward, torch runs them separately; on the pipeline's first stage, whose input needs no
gradient, it runs both as the weight gradient.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

from executor.rank.control_client import ControlStore
from executor.rank.worker import join_job
from executor.training.device import threads_of_a_rank
from experiments.models import gpt
from traces.common.atomic import write_text_atomically

V_SHAPED = "zb-v"
FLOAT_BYTES = 4
# Seconds after which a rank that has lost its peer gives up.
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeliningRun:
    """Parameters of a run: paced compute sleeps, real compute trains the example GPT with AdamW.

    ``learning_rate`` and ``weight_decay`` are AdamW's.

    Attributes:
        schedule: Name of the schedule; ``zb-v`` puts two stages on each rank.
        warmup_steps: Number of steps before the measured ones, 1 or more: torch infers shapes in its first step.
        activation_bytes: Size of one microbatch between two stages; for paced compute.
        action_s: Seconds that a rank takes for one microbatch in all its stages, for each of forward, input gradient
            and weight gradient; for paced compute.
        microbatch_samples: Number of sequences in a microbatch; for real compute.
        model: Arguments of the example GPT; for real compute.
    """

    schedule: Literal["gpipe", "1f1b", "zb-v"]
    compute: Literal["paced", "real"]
    steps: int
    warmup_steps: int = 2
    microbatches: int = 8
    activation_bytes: int = 1_000_000
    action_s: float = 0.02
    microbatch_samples: int = 4
    model: Mapping[str, int] = field(default_factory=dict)
    learning_rate: float = 0.001
    weight_decay: float = 0.01


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one rank.

    Attributes:
        step_s: Seconds from the start of each measured step to the start of the next one, or to the end of the run;
            there is no barrier between steps.
        cpu_s: Processor time of this process over these steps, seconds.
        losses: Mean loss of each step, warm-up steps included; empty on ranks without the last stage. With paced
            compute the values have no meaning.
    """

    step_s: list[float]
    cpu_s: float
    losses: list[float]


class _SleepForInput(torch.autograd.Function):
    """The identity; its backward takes as long as the gradient of a stage's input."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, anchor: Tensor | None, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        time.sleep(ctx.seconds)
        return gradient, torch.zeros(1) if ctx.needs_input_grad[1] else None, None


class _SleepForWeight(torch.autograd.Function):
    """The identity; its backward takes as long as the gradient of a stage's weights."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class _PacedStage(nn.Module):
    """A stage that adds its only weight, a single number, to its input and takes ``action_s`` seconds for each action.

    Autograd computes no gradient of the first stage's input, which is data. In a real first stage gradients still pass
    between its layers; the parameter ``anchor``, which requires a gradient, takes their time.
    """

    def __init__(self, action_s: float, *, is_first: bool) -> None:
        super().__init__()
        self._action_s = action_s
        self.weight = nn.Parameter(torch.zeros(1))
        self.anchor = nn.Parameter(torch.zeros(1)) if is_first else None

    def forward(self, received: Tensor) -> Tensor:
        time.sleep(self._action_s)
        passed: Tensor = _SleepForInput.apply(received, self.anchor, self._action_s)  # type: ignore[no-untyped-call]
        weight: Tensor = _SleepForWeight.apply(self.weight, self._action_s)  # type: ignore[no-untyped-call]
        return passed + weight


class _Paced:
    """A model of stages that sleep; each stage of a rank takes an equal share of the rank's times."""

    def __init__(self, run: PipeliningRun, ranks: int) -> None:
        self._run = run
        self._ranks = ranks
        self._values = torch.ones(run.microbatches, run.activation_bytes // FLOAT_BYTES)

    def stage(self, index: int, stages: int) -> nn.Module:
        return _PacedStage(self._run.action_s * self._ranks / stages, is_first=index == 0)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().mean()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._values, self._values


class _Real:
    """The example GPT, divided into stages of about equally many layers."""

    def __init__(self, run: PipeliningRun) -> None:
        torch.manual_seed(0)
        self._model = gpt.build(**run.model)
        self._samples = run.microbatches * run.microbatch_samples

    def stage(self, index: int, stages: int) -> nn.Module:
        """Return consecutive layers; if the layers do not divide evenly, the first stages get one more."""
        each, left_over = divmod(len(self._model.layers), stages)
        first = index * each + min(index, left_over)
        return nn.Sequential(*self._model.layers[first : first + each + (index < left_over)])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._model.loss(outputs, targets)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self._model.samples(step * self._samples, self._samples)


def train(run: PipeliningRun, rank: int, ranks: int) -> Measured:
    """Carry out all steps on this rank, in the process group that has been set up."""
    work = _Paced(run, ranks) if run.compute == "paced" else _Real(run)
    indices = [rank, 2 * ranks - 1 - rank] if run.schedule == V_SHAPED else [rank]
    count = ranks * len(indices)
    modules = [work.stage(index, count) for index in indices]
    step = _stepper(run, indices, count, modules, work.loss)
    parameters = [value for module in modules for value in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, run.learning_rate, weight_decay=run.weight_decay)
    holds_first, holds_last = 0 in indices, count - 1 in indices

    starts_s, losses, cpu_s = [], [], 0.0
    for number in range(run.warmup_steps + run.steps):
        if number == run.warmup_steps:
            distributed.barrier()
            cpu_s = time.process_time()
        starts_s.append(time.monotonic())
        inputs, targets = work.batch(number)
        optimizer.zero_grad()
        parts: list[Tensor] = []
        step(*([inputs] if holds_first else []), target=targets if holds_last else None, losses=parts)
        optimizer.step()
        if holds_last:
            losses.append(torch.stack(parts).mean().item())
    starts_s.append(time.monotonic())
    cpu_s = time.process_time() - cpu_s
    # A rank must not end while its peer still waits for a message from it.
    distributed.barrier()
    step_s = [end - start for start, end in pairwise(starts_s[run.warmup_steps :])]
    return Measured(step_s, cpu_s, losses)


def _stepper(
    run: PipeliningRun,
    indices: Sequence[int],
    count: int,
    modules: Sequence[nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[..., Any]:
    # Loaded here, since it takes a second, and launchers need only this file's dataclasses.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble

    cpu = torch.device("cpu")
    stages = [PipelineStage(module, index, count, cpu) for index, module in zip(indices, modules, strict=True)]
    if run.schedule == V_SHAPED:
        return ScheduleZBVZeroBubble(list(stages), run.microbatches, loss_fn=loss).step
    single = ScheduleGPipe if run.schedule == "gpipe" else Schedule1F1B
    return single(stages[0], run.microbatches, loss_fn=loss).step


def main(agent: str, job: str) -> None:
    """Run this rank; torchrun puts its number and the others' addresses into the environment."""
    client = join_job(agent, job)
    folder = Path(job)
    # As many threads as ropebridge's ranks use; torchrun sets one for each rank.
    torch.set_num_threads(threads_of_a_rank(int(os.environ["WORLD_SIZE"])))
    run = PipeliningRun(**json.loads((folder / "parameters.json").read_text()))
    store, ranks = ControlStore(client), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=TIMEOUT_S)
    distributed.init_process_group("gloo", store=store, rank=client.rank, world_size=ranks, timeout=timeout)
    rank = distributed.get_rank()
    measured = train(run, rank, distributed.get_world_size())
    write_text_atomically(folder / f"rank-{rank}.json", json.dumps(asdict(measured)))
    distributed.destroy_process_group()
