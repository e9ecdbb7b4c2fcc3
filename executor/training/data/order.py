"""The samples of training, in an order that depends on the seed only, and on the region if regions own data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from planner.plan.regional_batch import RegionalRun, StoredPart
from traces.common.errors import InputError

Samples = tuple[torch.Tensor, torch.Tensor]

# In place of the number of a target, which the loss then leaves out, as torch's cross-entropy does.
NO_TARGET = -100


@runtime_checkable
class EndlessData(Protocol):
    """Data with a sample for every position."""

    def samples(self, first: int, count: int) -> Samples:
        """Return inputs and targets of samples ``first`` to ``first + count - 1``; the same for the same indices."""


@runtime_checkable
class FiniteData(Protocol):
    """A data set, which is shuffled anew for each pass.

    Attributes:
        size: Number of samples.
    """

    size: int

    def select(self, indices: torch.Tensor) -> Samples:
        """Return inputs and targets of the samples with these indices, in this order; int64, 0 to ``size - 1``."""


@runtime_checkable
class DivisibleData(EndlessData, Protocol):
    """Endless passes through a data set with a known number of samples, of which a part can be read alone.

    Attributes:
        size: Number of samples.
    """

    size: int

    def part(self, first: int, size: int) -> "DivisibleData":
        """Return endless passes through samples ``first`` to ``first + size - 1`` of the data set only."""


SampleData = EndlessData | FiniteData


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of a step.

    Attributes:
        first: Position of its first sample: number of the samples of all steps before it.
        size: Number of samples.
        regional: Its runs, in order, if regions own data; empty otherwise.
    """

    first: int
    size: int
    regional: Sequence[RegionalRun] = ()

    def following(self) -> "Batch":
        """Return the batch of the next step if it has the same size."""
        return replace(self, first=self.first + self.size)


class DataOrder:
    """Chooses the sample at each position of training, by the seed only.

    Sample number n of a step has the position of the samples of all steps before it, plus n. So training uses the same
    samples in the same order with every plan, whatever its batches, also if it resumes at any step.
    `EndlessData.samples` gets the position itself. A data set of N samples is read in the order of `shuffled`.

    If regions own data, a region reads its own part of the data set in this way, as if there were no other: sample
    number n of the q samples that the region trains on in a step has the position step * q + n, for batches of equal
    size. So the samples of a region depend on the step, q and the seed only.
    """

    def __init__(self, data: SampleData, seed: int) -> None:
        self._data, self._seed = data, seed
        self._everywhere = _endless(data, seed)
        self._expects = isinstance(self._everywhere, ExpectingData)
        self._parts: dict[StoredPart, EndlessData] = {}

    def samples(self, first: int, count: int) -> Samples:
        """Return inputs and targets of the samples at positions ``first`` to ``first + count - 1``."""
        return self._everywhere.samples(first, count)

    def samples_of(self, batch: Batch, start: int, count: int) -> Samples:
        """Return inputs and targets of samples ``start`` to ``start + count - 1`` of a batch."""
        found = [data.samples(first, number) for data, first, number in self._places(batch, start, count)]
        if len(found) == 1:
            return found[0]
        inputs, targets = (torch.cat(each) for each in zip(*found, strict=True))
        return inputs, targets

    def expect(self, batch: Batch, start: int, count: int) -> None:
        """Tell data that can use it that these samples come next."""
        for data, first, number in self._places(batch, start, count) if self._expects else ():
            if isinstance(data, ExpectingData):
                data.expect(first, number)

    def _places(self, batch: Batch, start: int, count: int) -> list[tuple[EndlessData, int, int]]:
        """Return data, first position and number of each run of consecutive positions."""
        if not batch.regional:
            return [(self._everywhere, batch.first + start, count)]
        places = []
        for run in batch.regional:
            first, end = max(start, run.start), min(start + count, run.start + run.count)
            if first < end:
                # Also if training has begun with batches of another size, the region's samples follow one another.
                before = batch.first * run.per_step // batch.size
                position = before + run.first + first - run.start
                places.append((self._part(run.stored), position, end - first))
        return places

    def _part(self, stored: StoredPart) -> EndlessData:
        if stored not in self._parts:
            self._parts[stored] = stored_data(self._data, stored, self._seed)
        return self._parts[stored]


@runtime_checkable
class ExpectingData(Protocol):
    """Data that can prepare samples which are read soon."""

    def expect(self, first: int, count: int) -> None:
        """Prepare samples ``first`` to ``first + count - 1``, without waiting for them."""


def stored_data(data: SampleData, stored: StoredPart, seed: int) -> EndlessData:
    """Return endless passes through the part of the data that a region stores.

    Of a data set this is an interval of its samples. Of a model's endless samples it is an interval of each
    ``stored.whole`` samples.

    Raises:
        InputError: The data set has too few samples, or can only be read in order.
    """
    endless = _endless(data, seed)
    if isinstance(endless, DivisibleData):
        first, end = stored.bounds(endless.size)
        if first == end:
            raise InputError(
                f"the {endless.size} samples of the data set leave none for a region with {stored.own} of "
                f"{stored.whole} samples",
                where="data",
                valid="give the region a larger part, or the data set more samples",
            )
        return endless.part(first, end - first)
    if getattr(data, "is_read_in_order", False):
        raise InputError(
            "a data set that can only be read in order cannot be divided among regions",
            where="data",
            valid="leave it out, or give the data set '__len__' and '__getitem__'",
        )
    return _Interleaved(endless, stored)


def _endless(data: SampleData, seed: int) -> EndlessData:
    return ShuffledSamples(data, seed, 0, data.size) if isinstance(data, FiniteData) else data


class ShuffledSamples:
    """Endless passes through samples ``first`` to ``first + size - 1`` of a data set, in the order of `shuffled`."""

    def __init__(self, data: FiniteData, seed: int, first: int, size: int) -> None:
        self._data, self._seed, self._first, self.size = data, seed, first, size

    def samples(self, first: int, count: int) -> Samples:
        """Return inputs and targets of the samples at positions ``first`` to ``first + count - 1``."""
        return self._data.select(torch.from_numpy(shuffled(self._seed, first, count, self.size, self._first)))

    def part(self, first: int, size: int) -> "ShuffledSamples":
        """Return endless passes through a part of these samples."""
        return ShuffledSamples(self._data, self._seed, self._first + first, size)


class _Interleaved:
    """The samples of one region among those that a model makes without end."""

    def __init__(self, data: EndlessData, stored: StoredPart) -> None:
        self._data, self._stored = data, stored

    def samples(self, first: int, count: int) -> Samples:
        """Return inputs and targets of the region's samples ``first`` to ``first + count - 1``."""
        found, end, stored = [], first + count, self._stored
        while first < end:
            block, place = divmod(first, stored.own)
            number = min(end - first, stored.own - place)
            found.append(self._data.samples(block * stored.whole + stored.before + place, number))
            first += number
        inputs, targets = (torch.cat(each) for each in zip(*found, strict=True))
        return inputs, targets


def shuffled(seed: int, first: int, count: int, size: int, start: int = 0) -> NDArray[np.int64]:
    """Return the indices, in a data set, of positions ``first`` to ``first + count - 1``.

    The ``size`` samples of the data set from ``start`` on, N of them, are read in epochs: position p is entry p % N of
    the permutation of epoch p // N.
    """
    epochs, places = np.divmod(np.arange(first, first + count), size)
    parts = [permutation(seed, int(epoch), size, start)[places[epochs == epoch]] for epoch in np.unique(epochs)]
    return np.concatenate(parts) + start


# Cached for two epochs of two regions, since a batch may contain the end of one and the start of the next.
@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int, start: int = 0) -> NDArray[np.int64]:
    """Return the order in an epoch of ``size`` samples from index ``start`` on, as offsets from it, shape (size,).

    It is the argsort of raw numbers of the generator Philox with the key (seed, epoch) and the counter (0, 0, 0,
    start), which NumPy guarantees never to change.
    """
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, 0, 0, start], np.uint64)
    keys = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.argsort(keys, kind="stable")
