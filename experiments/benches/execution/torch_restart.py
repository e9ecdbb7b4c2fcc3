"""One rank of what a user would take instead: torchrun starts all ranks again, from the last checkpoint.

Started by torchrun as ``python -m experiments.benches.execution.torch_restart FOLDER STEPS``. It trains the example GPT
of the bench of recovery by torch's own 1F1B, and each rank writes its checkpoint after every step, which is the best
case: no step is done twice but the one that was under way. Each rank leaves its process's number in ``pid-RANK``, and a
line with the time (the machine's monotonic clock) for every finished step in ``steps-RANK``.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from executor.training.device import threads_of_a_rank
from experiments.benches.cases import GLOBAL_BATCH, LEARNING_RATE, MICROBATCHES, MODEL
from experiments.models import gpt

_MOMENTUM = 0.9

# Who waits for a rank that stands still gives up after this; torch's own default is half an hour.
_TIMEOUT = timedelta(seconds=30)


def main(folder: str, steps: str) -> None:
    """Train this rank's stage from the last step that all ranks have."""
    place, rank, ranks = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(threads_of_a_rank(ranks))
    # A store of its own for each attempt: in torchrun's, gloo finds the addresses of processes that are gone.
    store = distributed.FileStore(  # type: ignore[attr-defined]
        str(place / f"store-{os.environ['TORCHELASTIC_RESTART_COUNT']}"), ranks
    )
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    torch.manual_seed(0)
    model = gpt.build(**MODEL)
    each = len(model.layers) // ranks
    stage = nn.Sequential(*model.layers[rank * each : (rank + 1) * each if rank < ranks - 1 else None])
    optimizer = torch.optim.SGD(stage.parameters(), LEARNING_RATE, momentum=_MOMENTUM)
    first = _load(place, rank, stage, optimizer)
    loss = model.loss
    schedule = Schedule1F1B(PipelineStage(stage, rank, ranks, torch.device("cpu")), MICROBATCHES, loss_fn=loss)
    (place / f"pid-{rank}").write_text(str(os.getpid()))
    with (place / f"steps-{rank}").open("a", buffering=1) as done:
        for step in range(first, int(steps)):
            inputs, targets = model.samples(step * GLOBAL_BATCH, GLOBAL_BATCH)
            optimizer.zero_grad()
            schedule.step(*([inputs] if rank == 0 else []), target=targets if rank == ranks - 1 else None)
            optimizer.step()
            _save(place, rank, step + 1, stage, optimizer)
            done.write(f"{step} {time.monotonic()}\n")
    distributed.barrier()
    distributed.destroy_process_group()


def _checkpoint(place: Path, rank: int, step: int) -> Path:
    return place / f"checkpoint-{step}-{rank}.safetensors"


def _save(place: Path, rank: int, step: int, stage: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {f"parameter.{name}": value.detach() for name, value in stage.named_parameters()}
    for name, value in stage.named_parameters():
        state[f"momentum.{name}"] = optimizer.state[value]["momentum_buffer"]
    beside = place / f"saving-{rank}"
    save_file(state, beside)
    beside.rename(_checkpoint(place, rank, step))
    # The one before stays, for ranks that are not as far.
    _checkpoint(place, rank, step - 2).unlink(missing_ok=True)


def _load(place: Path, rank: int, stage: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take the newest state that all ranks have; return the step that comes next."""
    own = [int(path.name.split("-")[1]) for path in place.glob(f"checkpoint-*-{rank}.safetensors")]
    newest = torch.tensor(max(own, default=0))
    distributed.all_reduce(newest, op=distributed.ReduceOp.MIN)
    step = int(newest)
    if step:
        state = load_file(_checkpoint(place, rank, step))
        with torch.no_grad():
            for name, value in stage.named_parameters():
                value.copy_(state[f"parameter.{name}"])
                optimizer.state[value]["momentum_buffer"] = state[f"momentum.{name}"].clone()
    return step


if __name__ == "__main__":
    main(*sys.argv[1:])
