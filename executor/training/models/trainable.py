"""The interface of users' models: a chain of layers, a loss, and data; and the choice of the samples of each step."""

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
    """A model with unlimited data, which the function ``build`` of a model file may return."""

    def samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of samples ``first`` to ``first + count - 1``; the same for the same indices."""


@runtime_checkable
class FiniteModel(_Layered, Protocol):
    """A model with a data set, which the function ``build`` of a model file may return.

    Attributes:
        layers: Modules, each of which takes the one tensor that the module before it returns.
        size: Number of samples in the data set, which is shuffled anew for each pass.
    """

    size: int

    def select(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the samples with these indices, in this order; int64, 0 to ``size - 1``."""


TrainableModel = EndlessModel | FiniteModel


@runtime_checkable
class TensorParallelModel(Protocol):
    """A model whose layers can be sharded over the devices of a tensor-parallel group."""

    def parallel_layout(self, index: int) -> Mapping[str, str]:
        """Return how the linear submodules of layer ``index`` are sharded; every device computes all other submodules.

        Keys are names of `torch.nn.Linear` submodules, as in ``named_modules``; values are ``column`` or ``row``, in
        pairs. A ``column`` submodule gives each device an equal part of its outputs. The ``row`` submodule that follows
        takes those parts as inputs, and its outputs are summed over the devices. Between the two:

        - Operations must work on a part. Activation functions do, and attention too if it takes the number of heads
          from the tensor's size; a norm over the sharded dimension does not.
        - No trained parameter may be used, such as that of `torch.nn.PReLU`: each device would have only a part of its
          gradient. Such a model is refused.
        - Dropout drops the same places on each device, since all draw the same random numbers.
        """


# The members that a model must have, as error messages list them.
MEMBERS = "'layers', 'loss', and either 'samples' or both 'size' and 'select'"


def check_members(model: object, where: str) -> None:
    """Raise `InputError` if a result of ``build`` is not a `TrainableModel`: a member is missing or wrong."""
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
            valid="keep 'samples' for unlimited data, or 'size' and 'select' for a data set",
        )
    layers = model.layers  # type: ignore[attr-defined]
    if not isinstance(layers, Sequence | nn.ModuleList | nn.Sequential):
        raise InputError(f"'layers' is a {type(layers).__name__}", where=where, valid="give 'layers' a list of modules")
    if isinstance(model, FiniteModel) and (type(model.size) is not int or model.size < 1):
        raise InputError(f"'size' is {model.size!r}", where=where, valid="make it the number of samples, at least 1")


class DataOrder:
    """Chooses the samples of each step's batch, by the step, the global batch and the seed only.

    So training uses the same samples with every plan, also if it resumes at any step. Sample number n of a step has the
    position p = step * global_batch + n. `EndlessModel.samples` gets the index p. A data set of N samples is read in
    epochs: position p is entry p % N of the permutation of epoch p // N. The permutation is the argsort of raw numbers
    of the generator Philox with the key (seed, epoch), which NumPy guarantees never to change.
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


# Cached for two epochs, since a batch may contain the end of one and the start of the next.
@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Return the order of a data set of ``size`` samples in an epoch, shape (size,)."""
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    return np.argsort(keys, kind="stable")
