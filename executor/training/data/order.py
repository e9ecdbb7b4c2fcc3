"""The samples of training, in an order that depends on the seed only."""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

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


SampleData = EndlessData | FiniteData


class DataOrder:
    """Chooses the sample at each position of training, by the seed only.

    Sample number n of a step has the position of the samples of all steps before it, plus n. So training uses the same
    samples in the same order with every plan, whatever its batches, also if it resumes at any step.
    `EndlessData.samples` gets the position itself. A data set of N samples is read in the order of `shuffled`.
    """

    def __init__(self, data: SampleData, seed: int) -> None:
        self._read: Callable[[int, int], Samples]
        if isinstance(data, FiniteData):
            self._read = lambda first, count: data.select(torch.from_numpy(shuffled(seed, first, count, data.size)))
        else:
            self._read = data.samples

    def samples(self, first: int, count: int) -> Samples:
        """Return inputs and targets of the samples at positions ``first`` to ``first + count - 1``."""
        return self._read(first, count)


def shuffled(seed: int, first: int, count: int, size: int) -> NDArray[np.int64]:
    """Return the indices, in a data set of ``size`` samples, of positions ``first`` to ``first + count - 1``.

    A data set of N samples is read in epochs: position p is entry p % N of the permutation of epoch p // N.
    """
    epochs, places = np.divmod(np.arange(first, first + count), size)
    parts = [permutation(seed, int(epoch), size)[places[epochs == epoch]] for epoch in np.unique(epochs)]
    return np.concatenate(parts)


# Cached for two epochs, since a batch may contain the end of one and the start of the next.
@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Return the order of a data set of ``size`` samples in an epoch, shape (size,).

    It is the argsort of raw numbers of the generator Philox with the key (seed, epoch), which NumPy guarantees never to
    change.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    return np.argsort(keys, kind="stable")
