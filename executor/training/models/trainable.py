"""What a user's model is: a chain of layers, a loss, and data, of which each step trains on a fixed part."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from traces.common.errors import InputError


class _Layered(Protocol):
    layers: Sequence[nn.Module]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of the last layer's outputs: a scalar, the mean over the samples."""


class EndlessModel(_Layered, Protocol):
    """What a model file's ``build`` may return: a model whose every step trains on new samples."""

    def samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of samples ``first`` to ``first + count - 1``; each depends on its index only."""


@runtime_checkable
class FiniteModel(_Layered, Protocol):
    """What a model file's ``build`` may return: a model with a data set, shuffled anew for each pass over it.

    Attributes:
        layers: Modules, each of which takes the one tensor that the module before it returns.
    """

    size: int

    def select(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of these samples, in this order; indices are int64, from 0 to ``size - 1``."""


TrainableModel = EndlessModel | FiniteModel


@runtime_checkable
class TensorParallelModel(Protocol):
    """A model whose layers the devices of a tensor-parallel group may share."""

    def parallel_layout(self, index: int) -> Mapping[str, str]:
        """Return how linear submodules of layer ``index`` are sharded; all devices compute what it does not name.

        Keys are names of `torch.nn.Linear` submodules, as in ``named_modules``. ``column`` gives each device an equal
        part of the outputs; ``row`` takes those parts as inputs, and its outputs are summed over the devices. They come
        in pairs, a column before a row. What the layer does between the two must work on a part: activation functions
        do, and so does attention on some of the heads if their number is taken from the tensor's size. A norm over the
        sharded dimension does not. No trained parameter may be used there (`torch.nn.PReLU`, a norm of queries and keys
        with weights): each device would have its part's gradient only, and such a model is refused. Dropout may be
        used, but all devices draw the same numbers: each drops the same places of its part.
        """


# The members that a model must have, as error messages list them.
MEMBERS = "'layers', 'loss', and either 'samples' or both 'size' and 'select'"


def check_members(model: object, where: str) -> None:
    """Refuse a result of ``build`` that is not a `TrainableModel`.

    Raises:
        InputError: A member is missing, or is not what it should be.
    """
    wanted = ["layers", "loss"]
    if hasattr(model, "size") or hasattr(model, "select"):
        wanted += ["size", "select"]
    else:
        wanted.append("samples")
    for name in wanted:
        if not hasattr(model, name):
            raise InputError(
                f"what 'build' returns has no '{name}'", where=where, valid=f"return an object with {MEMBERS}"
            )
    if "size" in wanted and hasattr(model, "samples"):
        raise InputError(
            "what 'build' returns has both 'samples' and 'select'",
            where=where,
            valid="endless data has 'samples'; a data set has 'size' and 'select'",
        )
    layers = model.layers  # type: ignore[attr-defined]
    if not isinstance(layers, Sequence | nn.ModuleList | nn.Sequential):
        raise InputError(f"'layers' is a {type(layers).__name__}", where=where, valid="make it a list of modules")
    if isinstance(model, FiniteModel) and (type(model.size) is not int or model.size < 1):
        raise InputError(
            f"'size' is {model.size!r}", where=where, valid="the number of samples in the data set, at least 1"
        )


class DataOrder:
    """Chooses the samples of each step's batch, from the step, the global batch and the seed only.

    So every plan, resumed at any step, trains on the same samples. Sample ``offset`` of a step has the position
    p = step * global_batch + offset. Endless data gives the sample of index p. A data set of N samples is read in
    epochs: position p is entry p % N of the permutation of epoch p // N. The permutation is the argsort of raw numbers
    of Philox with the key (seed, epoch), which NumPy guarantees never to change.

    Args:
        seed: Seed of the order of a data set.
    """

    def __init__(self, model: TrainableModel, global_batch: int, seed: int) -> None:
        self._model = model
        self._global_batch = global_batch
        self._seed = seed

    def samples(self, step: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of samples ``start`` to ``start + count - 1`` of a step's batch."""
        position = step * self._global_batch + start
        if isinstance(self._model, FiniteModel):
            return self._model.select(torch.from_numpy(self._indices(position, count, self._model.size)))
        return self._model.samples(position, count)

    def _indices(self, position: int, count: int, size: int) -> NDArray[np.int64]:
        epochs, places = np.divmod(np.arange(position, position + count), size)
        parts = [permutation(self._seed, int(epoch), size)[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(parts)


# A batch may span two epochs.
@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Return the order of a data set of ``size`` samples in an epoch, shape (size,)."""
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    return np.argsort(keys, kind="stable")
