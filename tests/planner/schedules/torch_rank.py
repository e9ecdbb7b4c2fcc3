"""Ranks of a pipeline that torch's own runtime works off from a CSV file: run by test_torch_runtime.py."""

import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, SAMPLES = 8, 12


def layers(stages: int) -> list[nn.Module]:
    """The same model in every process, one layer a stage."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator)


def main(folder: Path, ranks: int, microbatches: int) -> None:
    """Fork the ranks: torch is loaded once for all of them."""
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            run(folder, rank, ranks, microbatches)
            return
        processes.append(process)
    statuses = [os.waitpid(process, 0)[1] for process in processes]
    if any(statuses):
        sys.exit("a rank has failed")


def run(folder: Path, rank: int, ranks: int, microbatches: int) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    module = layers(ranks)[rank]
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = _PipelineScheduleRuntime([stage], microbatches, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(str(folder / "orders.csv"), format="compute_only")
    inputs, targets = batch()
    losses: list[torch.Tensor] = []
    schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == ranks - 1 else None, losses=losses)
    gradients = [parameter.grad for parameter in module.parameters()]
    torch.save((gradients, losses), folder / f"rank-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(text) for text in sys.argv[2:]))
