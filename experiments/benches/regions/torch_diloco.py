"""The program of one rank of DiLoCo as torchft carries it out, with torch.distributed alone, to compare with.

It follows torchft 0.2.0 (`torchft.local_sgd.DiLoCo`): fragments take turns; some steps before its turn, a fragment's
pseudo-gradients are summed over all ranks in the background; then the rank waits for the sum, takes the outer step, and
mixes the result with its own parameters. It leaves out what torchft does for fault tolerance, a quorum before each sum
and a vote after it, and sums each fragment in one message instead of one for each parameter, both in its favour.

`main` runs one rank of equal workers. The job's documents are those of ropebridge's own ranks. At the end rank 0 writes
the mean of all parameters, and the time that all steps took in seconds, to `PARAMETERS_FILE` and `END_FILE` in the
job's folder.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

from executor.core.clock import announce_origin
from executor.core.job import JobFolder
from executor.rank.control_client import ControlStore
from executor.rank.worker import join_job
from executor.training.data.order import DataOrder
from executor.training.device import threads_of_a_rank
from executor.training.models.loading import load_model
from executor.training.models.trainable import own_data
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario

PARAMETERS_FILE, END_FILE = "parameters.safetensors", "end_s.txt"

TIMEOUT_S = 300.0


@dataclass(eq=False)
class _Fragment:
    """Parameters that are exchanged together, and their common values before the exchange."""

    parameters: Sequence[nn.Parameter]
    outer: torch.optim.Optimizer
    common: Sequence[Tensor]
    pending: distributed.Work | None = None
    summed: Tensor | None = None

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], settings: OuterStep) -> "_Fragment":
        outer = torch.optim.SGD(parameters, settings.learning_rate, momentum=settings.momentum, nesterov=True)
        return cls(parameters, outer, [each.detach().clone() for each in parameters])

    def send(self) -> None:
        """Begin to sum the pseudo-gradients of all ranks."""
        parts = [old - new.detach() for old, new in zip(self.common, self.parameters, strict=True)]
        self.summed = torch.cat([part.flatten() for part in parts])
        self.pending = distributed.all_reduce(self.summed, async_op=True)

    def merge(self, ranks: int, mixing: float) -> None:
        """Wait for the sum, take the outer step from the common values, and mix the result with the rank's own."""
        assert self.pending is not None
        assert self.summed is not None
        self.pending.wait()
        means = torch.split(self.summed / ranks, [each.numel() for each in self.parameters])
        with torch.no_grad():
            own = [each.detach().clone() for each in self.parameters]
            for parameter, common, mean in zip(self.parameters, self.common, means, strict=True):
                parameter.copy_(common)
                parameter.grad = mean.view_as(parameter)
            self.outer.step()
            self.outer.zero_grad()
            for parameter, common, mine in zip(self.parameters, self.common, own, strict=True):
                common.copy_(parameter)
                parameter.lerp_(mine, mixing)
        self.pending = self.summed = None


def train(scenario: Scenario, plan: Plan, steps: int, rank: int) -> nn.Module:
    """Carry out all steps on this rank in the process group that has been set up; return the layers."""
    assert scenario.code is not None, "there is something to train"
    training, outer = scenario.training, plan.synchronisation.outer
    model = load_model(scenario.code, training.seed)
    layers = nn.Sequential(*model.layers)
    data = DataOrder(own_data(model), training.seed)
    rule = training.optimizer
    inner = torch.optim.AdamW(layers.parameters(), rule.learning_rate, weight_decay=rule.weight_decay)
    ranks, samples = len(plan.pipelines), plan.pipelines[rank].samples
    fragments = [
        _Fragment.of([each for layer in model.layers[index :: outer.fragments] for each in layer.parameters()], outer)
        for index in range(outer.fragments)
    ]
    turn_steps, turn, since = plan.synchronisation.interval_steps // outer.fragments, 0, 0
    for step in range(steps):
        inputs, targets = data.samples((step * ranks + rank) * samples, samples)
        inner.zero_grad()
        model.loss(layers(inputs), targets).backward()  # type: ignore[no-untyped-call]
        inner.step()
        since += 1
        if since == turn_steps - outer.overlap_steps:
            fragments[turn].send()
        if since == turn_steps:
            fragments[turn].merge(ranks, outer.mixing)
            turn, since = (turn + 1) % outer.fragments, 0
    return layers


def main(agent: str, job: str) -> None:
    """Run this rank; torchrun puts its number and the others' addresses into the environment."""
    client, folder = join_job(agent, job), Path(job)
    scenario, plan, config = JobFolder(folder).read()
    ranks = len(plan.pipelines)
    torch.set_num_threads(threads_of_a_rank(ranks))
    timeout = timedelta(seconds=TIMEOUT_S)
    store = ControlStore(client)
    distributed.init_process_group("gloo", store=store, rank=client.rank, world_size=ranks, timeout=timeout)
    rank = distributed.get_rank()
    distributed.barrier()
    start_s = time.monotonic()
    if rank == 0:
        # From now on the emulated links follow their traces.
        announce_origin(JobFolder(folder).origin, start_s)
    layers = train(scenario, plan, config.steps, rank)
    distributed.barrier()
    if rank == 0:
        (folder / END_FILE).write_text(str(time.monotonic() - start_s))
    for parameter in layers.parameters():
        distributed.all_reduce(parameter.data)
        parameter.data /= ranks
    if rank == 0:
        save_file(layers.state_dict(), folder / PARAMETERS_FILE)
    distributed.destroy_process_group()
