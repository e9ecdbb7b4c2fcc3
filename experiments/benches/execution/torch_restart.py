"""Measures how torchrun recovers: after a rank has failed, it restarts all ranks from the last checkpoint.

torchrun starts each rank as ``python -m experiments.benches.execution.torch_restart FOLDER STEPS``. The ranks train the
example GPT of the recovery bench by torch's own 1F1B, and each writes its checkpoint after every step, which is the
best case: only the step under way is repeated. Each rank writes its process id into ``pid-RANK``, and for every
finished step a line with the time (the machine's monotonic clock) into ``steps-RANK``.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn

from executor.training.device import threads_of_a_rank
from experiments.benches.cases import GLOBAL_BATCH, LEARNING_RATE, MICROBATCHES, MODEL
from experiments.models import gpt
from traces.common.atomic import scratch_folder

RANKS = 4
_STEPS = 100_000
WARM_UP_STEPS = 3
_PAUSE_S = 0.002
_LIMIT_S = 180.0


def restart_s(chance: random.Random, number: signal.Signals) -> float:
    """Train under torchrun and send a signal to a random rank; return the seconds until all ranks finish a new step."""
    with scratch_folder() as place:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += ["--max-restarts=3", "-m", "experiments.benches.execution.torch_restart", str(place), str(_STEPS)]
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        with (place / "log.txt").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            await_step(_finished, place, WARM_UP_STEPS, _LIMIT_S)
            time.sleep(chance.uniform(0.0, 1.0))
            victim = int((place / f"pid-{chance.randrange(RANKS)}").read_text())
            before = _finished(place)
            killed_s = time.monotonic()
            os.kill(victim, number)
            # Some ranks may still finish the step under way, if they need nothing from the failed rank, but not all.
            await_step(_finished, place, before + 2, _LIMIT_S)
            lines = (line for rank in range(RANKS) for line in _lines(place, rank))
            return max(time_s for step, time_s in lines if step == before + 2) - killed_s
        finally:
            # torchrun ends its ranks, which have sessions of their own, by a signal that stopped ones do not handle.
            for path in place.glob("pid-*"):
                with suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGCONT)
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _finished(place: Path) -> int:
    """Return the latest step that all ranks have finished, -1 if there is none."""
    return min(max((step for step, _ in _lines(place, rank)), default=-1) for rank in range(RANKS))


def await_step(latest: Callable[[Path], int], place: Path, step: int, limit_s: float) -> None:
    """Wait until the latest step, which ``latest`` reads from a folder, is at least ``step``.

    Raises:
        TimeoutError: The step is not reached in ``limit_s`` seconds; the message has the end of the folder's log.
    """
    end_s = time.monotonic() + limit_s
    while latest(place) < step:
        if time.monotonic() > end_s:
            log = place / "log.txt"
            raise TimeoutError(f"step {step} is not reached: {log.read_text()[-2000:] if log.exists() else ''}")
        time.sleep(_PAUSE_S)


def _lines(place: Path, rank: int) -> list[tuple[int, float]]:
    path = place / f"steps-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    split = [line.split() for line in lines]
    return [(int(words[0]), float(words[1])) for words in split if len(words) == 2]


_MOMENTUM = 0.9

# Time after which a rank that waits for a stopped rank fails; torch's default is half an hour.
_TIMEOUT = timedelta(seconds=30)


def main(folder: str, steps: str) -> None:
    """Train this rank's stage, from the newest checkpoint that all ranks have written."""
    # Loaded here, since it takes a second, and launchers only start this file.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    place, rank, ranks = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(threads_of_a_rank(ranks))
    # Each attempt has its own store. In torchrun's store gloo would find addresses of processes that have ended.
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
    # The previous checkpoint stays, for ranks that are one step behind.
    _checkpoint(place, rank, step - 2).unlink(missing_ok=True)


def _load(place: Path, rank: int, stage: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest state that all ranks have written; return the step to train next."""
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
