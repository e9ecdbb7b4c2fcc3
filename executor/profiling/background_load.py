"""Processes that train the same layers beside a measurement, as the other ranks of a machine do.

Ranks of one machine share caches, memory and the clock of a processor. Each process is started as ``python -m
executor.profiling.background_load PARENT_PID``, reads what to train from its input, prints that it is ready, and goes
on until it is killed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from executor.core.subprocesses import die_with_parent, python_environment
from executor.profiling.layer_times import measure_layers
from executor.training.device import keep_freed_memory
from executor.training.models.loading import load_with_sizes
from planner.scenario.scenario import ModelCode
from planner.scenario.training import Optimizer, Training
from traces.common.errors import RunError

_READY = "ready"
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What a background process trains.

    Attributes:
        samples: Microbatch sizes, rising.
        precision: One of `planner.scenario.training.ELEMENT_BYTES`.
        threads: Number of threads of each process.
    """

    path: str
    arguments: dict[str, int | float | str | bool]
    samples: Sequence[int]
    optimizer: str
    precision: str
    threads: int


@contextmanager
def background_load(count: int, config: LoadConfig) -> Iterator[None]:
    """Run ``count`` processes that compute on the CPU during the context.

    Raises:
        RunError: One of them ends.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(_process(config)) for _ in range(count)]
        for process in processes:
            assert process.stdout is not None, "it is a pipe"
            if process.stdout.readline().strip() != _READY:
                raise RunError("a process that was to compute beside the measurement has ended; see what it wrote")
        yield
        if any(process.poll() is not None for process in processes):
            raise RunError("a process that computed beside the measurement has ended; see what it wrote")


@contextmanager
def _process(config: LoadConfig) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "executor.profiling.background_load", str(os.getpid())]
    # In a session of its own: Ctrl-C must reach only the process that ends it.
    process = subprocess.Popen(
        command,
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdin is not None, "it is a pipe"
        # A process that has ended already does not print that it is ready.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asdict(config)))
            process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait(_END_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "it is a pipe"
            with suppress(BrokenPipeError):
                pipe.close()


def main(parent: str) -> None:
    """Compute until the process is killed."""
    die_with_parent(int(parent))
    keep_freed_memory()
    config = LoadConfig(**json.loads(sys.stdin.read()))
    torch.set_num_threads(config.threads)
    training = Training(max(config.samples), optimizer=Optimizer(config.optimizer), precision=config.precision)
    loaded = load_with_sizes(ModelCode(Path(config.path), config.arguments), training.seed)
    print(_READY, flush=True)
    while True:
        for samples in config.samples:
            measure_layers(loaded, range(len(loaded.sizes)), samples, training, repeats=2, wait_s=0.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
