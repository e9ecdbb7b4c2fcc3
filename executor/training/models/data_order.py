"""Which samples a step trains on: a function of the step alone, whatever the plan."""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from executor.training.models.protocols import FiniteModel, TrainableModel


class DataOrder:
    """The samples of each step's batch, so that any plan, resumed at any step, trains on the same ones.

    Position ``step * global_batch + offset`` of endless data is the sample of that index. A data set of N samples is
    gone through in epochs: position p is entry p % N of the permutation of epoch p // N. The permutation sorts the
    raw output of Philox with the key (seed, epoch), of which NumPy promises that it never changes.

    Args:
        model: Has the data.
        global_batch: Samples in a step.
        seed: Of the order of a data set.
    """

    def __init__(self, model: TrainableModel, global_batch: int, seed: int) -> None:
        self._model = model
        self._global_batch = global_batch
        self._seed = seed

    def samples(self, step: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of samples ``first`` to ``first + count - 1`` of a step's batch."""
        position = step * self._global_batch + first
        if isinstance(self._model, FiniteModel):
            return self._model.select(torch.from_numpy(self._indices(position, count, self._model.size)))
        return self._model.samples(position, count)

    def _indices(self, position: int, count: int, size: int) -> NDArray[np.int64]:
        epochs, places = np.divmod(np.arange(position, position + count), size)
        parts = [permutation(self._seed, int(epoch), size)[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(parts)


# The epoch that ends and the one that begins.
@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Return the order of a data set of ``size`` samples in an epoch, [size]."""
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    return np.argsort(keys, kind="stable")
