"""The interface of users' models: a chain of layers, a loss and, unless the scenario names it, the data."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from executor.training.data.order import EndlessData, FiniteData, SampleData
from traces.common.errors import InputError

# How a tensor-parallel group shards a submodule: see `TensorParallelModel.parallel_layout`.
COLUMN, ROW, VOCABULARY, SUMMED = "column", "row", "vocabulary", "summed"


class TrainableModel(Protocol):
    """A model, which the function ``build`` of a model file returns.

    Without ``data`` in the scenario's ``training`` the model also has the data of `EndlessData` or `FiniteData`.

    Attributes:
        layers: Modules, each of which takes the one tensor that the module before it returns.
    """

    layers: Sequence[nn.Module]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of the last layer's outputs: a scalar, the mean over the samples."""


@runtime_checkable
class TensorParallelModel(Protocol):
    """A model whose layers can be sharded over the devices of a tensor-parallel group."""

    def parallel_layout(self, index: int) -> Mapping[str, str]:
        """Return how the submodules of layer ``index`` are sharded; every device computes all other submodules.

        Keys are names of `torch.nn.Linear` submodules, as in ``named_modules``; values are ``column`` or ``row``, in
        pairs. A ``column`` submodule gives each device an equal part of its outputs. The ``row`` submodule that follows
        takes those parts as inputs, and its outputs are summed over the devices. Between the two:

        - Operations must work on a part. Activation functions do, and attention too if it takes the number of heads
          from the tensor's size; a norm over the sharded dimension does not.
        - No trained parameter may be used, such as that of `torch.nn.PReLU`: each device would have only a part of its
          gradient. Such a model is refused, unless the submodule with the parameter has the value ``summed``: then its
          gradients are summed over the devices.
        - Dropout drops the same places on each device, since all draw the same random numbers.

        The value ``vocabulary`` gives each device equally many rows of a `torch.nn.Embedding`, whose outputs are
        summed, or of the linear layer whose outputs the last layer returns. The model's loss then gets the scores of
        this device's rows, and must use `ShardedScores`. If the number of devices does not divide the rows, the
        submodule is not sharded.
        """


@runtime_checkable
class ShardedScores(Protocol):
    """A sharded matrix of scores, in place of the linear layer that had the value ``vocabulary``."""

    def cross_entropy(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy over all rows, from this device's scores (count, own rows) and targets."""


@runtime_checkable
class TiedModel(Protocol):
    """A model whose layers hold copies of one parameter, which stay equal since the copies' gradients are summed.

    Attributes:
        tied: The layer and the name in it of each copy; each layer has one at most.
    """

    tied: Sequence[tuple[int, str]]


# The members that a model with data must have, as error messages list them.
MEMBERS = "'layers', 'loss', and either 'samples' or both 'size' and 'select'"


def check_members(model: object, where: str) -> None:
    """Raise `InputError` if a result of ``build`` is not a `TrainableModel`: a member is missing or wrong."""
    _refuse_missing(model, ("layers", "loss"), where, f"return an object with {MEMBERS}")
    layers = model.layers  # type: ignore[attr-defined]
    if not isinstance(layers, Sequence | nn.ModuleList | nn.Sequential):
        raise InputError(f"'layers' is a {type(layers).__name__}", where=where, valid="give 'layers' a list of modules")


def own_data(model: object, where: str = "") -> SampleData:
    """Return the data of a model that has its own; raise `InputError` if a member is missing or wrong."""
    is_finite = hasattr(model, "size") or hasattr(model, "select")
    advice = f"return an object with {MEMBERS}, or name the data in the scenario: 'training: {{data: ...}}'"
    _refuse_missing(model, ("size", "select") if is_finite else ("samples",), where, advice)
    if is_finite and hasattr(model, "samples"):
        raise InputError(
            "what 'build' returns has both 'samples' and 'select'",
            where=where,
            valid="keep 'samples' for unlimited data, or 'size' and 'select' for a data set",
        )
    if isinstance(model, FiniteData):
        if type(model.size) is not int or model.size < 1:
            raise InputError(f"'size' is {model.size!r}", where, "make it the number of samples, at least 1")
        return model
    assert isinstance(model, EndlessData), "it has samples"
    return model


def _refuse_missing(model: object, members: Sequence[str], where: str, valid: str) -> None:
    for name in members:
        if not hasattr(model, name):
            raise InputError(f"what 'build' returns has no '{name}'", where=where, valid=valid)
