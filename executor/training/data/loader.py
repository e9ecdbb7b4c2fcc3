"""Loads the samples of a rank's stages ahead of them, in the order in which the plan's steps need them."""

import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from executor.core.subprocesses import close_inherited_sockets, die_with_parent, name_process
from executor.training.data.datasets import StreamedSamples
from executor.training.data.order import Batch, DataOrder, SampleData
from traces.common.errors import RopebridgeError, RunError

# The most parts of batches that a process has ready or is reading.
_MOST_AHEAD = 64


@dataclass(frozen=True, slots=True, order=True)
class BatchPart:
    """Samples ``start`` to ``start + count - 1`` of a step's batch, of which a rank needs inputs, targets or both."""

    start: int
    count: int
    inputs: bool
    targets: bool


@dataclass(slots=True)
class _Loaded:
    """Inputs and targets of a part until they are taken, or the error with which they could not be read."""

    inputs: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    error: RopebridgeError | None = None


# The batch of a step, and a part of it.
_Request = tuple[Batch, BatchPart]

# Before the first step. No batch follows it.
_NO_BATCH = Batch(-1, 0)


class SampleLoader:
    """Gives a rank the samples of each step, loaded ahead by ``workers`` processes.

    The parts of a step's batch are loaded in the order of their samples, and after them those of the following steps,
    for which the plan, and so the size of the batch, is assumed to stay. Where it does not, or a step is repeated,
    loading begins anew. So the assumption only decides how long a stage waits, never which samples it gets. The
    processes end with this one.
    """

    def __init__(self, data: SampleData, seed: int, workers: int = 0) -> None:
        self._data, self._workers = data, workers
        self._order = DataOrder(data, seed)
        self._batch = _NO_BATCH
        self._parts: Sequence[BatchPart] = ()
        # Number of parts of the step that have not come yet.
        self._coming = 0
        self._here: dict[tuple[int, int], _Loaded] = {}
        self._stream: Iterator[tuple[BatchPart, _Loaded]] | None = None
        self._requests = _Requests()
        self._loader: DataLoader[tuple[BatchPart, _Loaded]] | None = None

    def start_step(self, batch: Batch, parts: Sequence[BatchPart]) -> None:
        """Begin a step; drop what was not taken of the step before.

        Args:
            batch: The batch of the step.
            parts: The parts of the batch that the rank needs; those of equal samples are loaded once.
        """
        merged = _merged(parts)
        expected = (self._batch.following(), self._parts)
        goes_on = self._stream is not None and not self._coming and (batch, merged) == expected
        self._batch, self._parts, self._coming = batch, merged, len(merged)
        self._here.clear()
        if not goes_on:
            self._stream = self._begin() if merged else None
        if not self._workers:
            for part in merged:
                self._order.expect(batch.following(), part.start, part.count)

    def inputs(self, start: int, count: int) -> torch.Tensor:
        """Return the inputs of samples ``start`` to ``start + count - 1`` of the step's batch."""
        loaded = self._loaded(start, count)
        if loaded.inputs is None:
            return self._order.samples_of(self._batch, start, count)[0]
        found, loaded.inputs = loaded.inputs, None
        return found

    def targets(self, start: int, count: int) -> torch.Tensor:
        """Return the targets of samples ``start`` to ``start + count - 1`` of the step's batch."""
        loaded = self._loaded(start, count)
        if loaded.targets is None:
            return self._order.samples_of(self._batch, start, count)[1]
        found, loaded.targets = loaded.targets, None
        return found

    def close(self) -> None:
        """End the processes."""
        self._stream, self._loader = None, None

    def _loaded(self, start: int, count: int) -> _Loaded:
        """Return what is loaded of these samples, after waiting for it; nothing if no part has them."""
        while (start, count) not in self._here and self._coming:
            assert self._stream is not None, "parts are coming"
            try:
                part, loaded = next(self._stream)
            except RuntimeError as error:
                raise RunError(f"a process that loads data has ended: {error}") from error
            self._coming -= 1
            self._here[part.start, part.count] = loaded
        found = self._here.get((start, count), _Loaded())
        if found.error is not None:
            raise found.error
        return found

    def _begin(self) -> Iterator[tuple[BatchPart, _Loaded]]:
        """Return the parts from the present step on."""
        self._requests.batch, self._requests.parts = self._batch, self._parts
        load = _Loading(self._order)
        if not self._workers:
            return map(load.__getitem__, self._requests)
        with warnings.catch_warnings():
            # Torch warns of more processes than cores, Python of a fork of a process with several threads.
            warnings.simplefilter("ignore")
            if self._loader is None:
                self._loader = self._processes(load)
            return _quiet_iter(self._loader)

    def _processes(self, load: "_Loading") -> DataLoader[tuple[BatchPart, _Loaded]]:
        # A whole step ahead, since a stage may do all forwards of a step before its first backward.
        ahead = max(2, min(_MOST_AHEAD, -(-len(self._parts) // self._workers)))
        return DataLoader(
            load,
            batch_size=None,
            sampler=self._requests,
            num_workers=self._workers,
            prefetch_factor=ahead,
            persistent_workers=True,
            multiprocessing_context="fork",
            worker_init_fn=partial(_begin_worker, os.getpid(), self._data),
            # Torch draws a number for its workers, which must not come from the generator of the model.
            generator=torch.Generator(),
        )


def _quiet_iter(loader: DataLoader[tuple[BatchPart, _Loaded]]) -> Iterator[tuple[BatchPart, _Loaded]]:
    """Return ``iter(loader)``, without the signal handler that torch installs for it.

    The handler raises, wherever the main thread happens to be, as soon as a process has ended. ``next`` notices it too.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    iterator = iter(loader)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)
    return iterator


class _Requests(Sampler[_Request]):
    """The parts of a step and, without end, those of the following steps."""

    def __init__(self) -> None:
        self.batch = _NO_BATCH
        self.parts: Sequence[BatchPart] = ()

    def __iter__(self) -> Iterator[_Request]:
        batches = accumulate(repeat(self.batch), lambda batch, _: batch.following())
        parts = self.parts
        return ((batch, part) for batch in batches for part in parts)


class _Loading(Dataset[tuple[BatchPart, _Loaded]]):
    """Loads the part of a request, in this process or in one of torch's `DataLoader`."""

    def __init__(self, order: DataOrder) -> None:
        self._order = order

    def __getitem__(self, request: _Request) -> tuple[BatchPart, _Loaded]:
        batch, part = request
        try:
            inputs, targets = self._order.samples_of(batch, part.start, part.count)
        except RopebridgeError as error:
            # Torch would add the stack of the process to an error that leaves it.
            return part, _Loaded(error=error.with_traceback(None))
        return part, _Loaded(inputs if part.inputs else None, targets if part.targets else None)


def _merged(parts: Sequence[BatchPart]) -> list[BatchPart]:
    """Return the parts in the order of their samples, with one part for equal samples."""
    needs: dict[tuple[int, int], tuple[bool, bool]] = {}
    for part in parts:
        inputs, targets = needs.get((part.start, part.count), (False, False))
        needs[part.start, part.count] = (inputs or part.inputs, targets or part.targets)
    return [BatchPart(*samples, *needed) for samples, needed in sorted(needs.items())]


def _begin_worker(parent: int, data: SampleData, number: int) -> None:
    die_with_parent(parent)
    close_inherited_sockets()
    name_process(f"data {number}")
    if isinstance(data, StreamedSamples):
        data.forget_place()
