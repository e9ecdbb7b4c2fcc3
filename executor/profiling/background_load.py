"""Background processes that train the same layers during a measurement, as the other ranks of a machine would.

Ranks of one machine share a processor's caches, memory and clock, so that each is slower than alone. A process is
started as ``python -m executor.profiling.background_load PARENT_PID``. It reads a `LoadConfig` as JSON from standard
input, prints ``ready``, and trains until it is killed.
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
from executor.profiling.boundary_messages import Pauses
from executor.profiling.layer_times import measure_layers
from executor.training.device import keep_freed_memory
from executor.training.models.loading import load_with_sizes
from planner.files.documents import Document
from planner.files.importers.huggingface import read_config
from planner.files.parsing import Part
from planner.files.training import read_data
from planner.scenario.scenario import Code, HuggingFaceCode, ModelCode
from planner.scenario.training import Optimizer, Training
from traces.common.errors import RunError

_READY = "ready"
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """What a background process trains: the model of the file ``path``, with a microbatch of each size in ``samples``.

    Attributes:
        precision: One of `planner.scenario.training.PRECISIONS`.
        threads: Number of torch threads of each process.
        data: Path of a file that names the data, as ``data`` of a scenario's ``training``; empty for the model's own.
        tokens: Tokens of a sample if ``path`` is a ``config.json``; 0 for a file with a function ``build``.
    """

    path: str
    arguments: dict[str, int | float | str | bool]
    samples: Sequence[int]
    optimizer: str
    precision: str
    threads: int
    data: str = ""
    tokens: int = 0

    @property
    def code(self) -> Code:
        """The model's file, or its configuration."""
        path = Path(self.path)
        return HuggingFaceCode(path, read_config(path), self.tokens) if self.tokens else ModelCode(path, self.arguments)


@contextmanager
def background_load(count: int, config: LoadConfig) -> Iterator[None]:
    """Run ``count`` background processes on the CPU during the context; raise `RunError` if one of them ends."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_process(config)) for _ in range(count)]
        for process in processes:
            assert process.stdout is not None, "it is a pipe"
            if process.stdout.readline().strip() != _READY:
                raise RunError("a background process of the measurement has ended before it was ready; see its output")
        yield
        if any(process.poll() is not None for process in processes):
            raise RunError("a background process of the measurement has ended too early; see its output")


@contextmanager
def _process(config: LoadConfig) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "executor.profiling.background_load", str(os.getpid())]
    # In a session of its own, so that Ctrl-C reaches only this process, which then kills the background process.
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
        # If the process has ended already, `background_load` misses its line "ready".
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
    """Train until this process is killed."""
    die_with_parent(int(parent))
    keep_freed_memory()
    config = LoadConfig(**json.loads(sys.stdin.read()))
    torch.set_num_threads(config.threads)
    training = Training(max(config.samples), optimizer=Optimizer(config.optimizer), precision=config.precision)
    named = read_data(Part(Document(Path(config.data)))) if config.data else None
    loaded = load_with_sizes(config.code, training.seed, training.precision, named)
    print(_READY, flush=True)
    while True:
        for samples in config.samples:
            measure_layers(loaded, range(len(loaded.sizes)), samples, training, repeats=2, boundary=Pauses(0.0))


if __name__ == "__main__":
    main(*sys.argv[1:])
