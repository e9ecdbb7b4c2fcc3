"""Processes that train the same layers beside one that measures: what the other ranks of a machine do meanwhile.

Two ranks share caches, memory and the clock of a processor. Each companion is started as ``python -m
executor.profiling.background_load PARENT_PID``, reads what to train from its input, says that it is ready, and goes on
until somebody ends it.
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
    """What a companion trains.

    Attributes:
        path: The model's file.
        arguments: Of its ``build``.
        samples: Sizes of microbatches, rising.
        optimizer: Name of the update rule.
        precision: What layers compute in.
        threads: Of each process.
    """

    path: str
    arguments: dict[str, int | float | str | bool]
    samples: Sequence[int]
    optimizer: str
    precision: str
    threads: int


@contextmanager
def background_load(count: int, orders: LoadConfig) -> Iterator[None]:
    """Around a measurement on the CPU: as many processes compute as it says.

    Raises:
        RunError: One of them ends.
    """
    with ExitStack() as stack:
        started = [stack.enter_context(_companion(orders)) for _ in range(count)]
        for process in started:
            assert process.stdout is not None, "it is a pipe"
            if process.stdout.readline().strip() != _READY:
                raise RunError("a process that was to compute beside the measurement has ended; see what it wrote")
        yield
        if any(process.poll() is not None for process in started):
            raise RunError("a process that computed beside the measurement has ended; see what it wrote")


@contextmanager
def _companion(orders: LoadConfig) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "executor.profiling.background_load", str(os.getpid())]
    # In a session of its own, so that Ctrl-C reaches the one process that ends the others.
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
        # Who has ended already is missed where it was to say that it is ready.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asdict(orders)))
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
    """Compute until somebody ends this."""
    die_with_parent(int(parent))
    keep_freed_memory()
    orders = LoadConfig(**json.loads(sys.stdin.read()))
    torch.set_num_threads(orders.threads)
    training = Training(max(orders.samples), optimizer=Optimizer(orders.optimizer), precision=orders.precision)
    loaded = load_with_sizes(ModelCode(Path(orders.path), orders.arguments), training.seed)
    print(_READY, flush=True)
    while True:
        for samples in orders.samples:
            measure_layers(loaded, range(len(loaded.sizes)), samples, training, repeats=2, wait_s=0.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
