"""Linear layers cut over the devices of a tensor-parallel group, in pairs as Megatron-LM does (arXiv 1909.08053).

The outputs of the first one are cut (``column``), so are the inputs of the second (``row``), whose outputs the group
sums; what lies between works on a shard. A shard is an ordinary layer with ordinary parameters, so that whatever
splits a backward, updates, or sums gradients need not know of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn

from executor.training.tensor_parallel import gradient_norm

COLUMN, ROW = "column", "row"


class Group(Protocol):
    """Those who compute a layer together."""

    def shard(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return this device's part of a tensor that all of them hold, cut along a dimension."""

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs, which all of them hold; in backward, the sum of their gradients."""

    def total(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the sum of everybody's outputs; in backward, its gradient."""


class RankGroup(Group, Protocol):
    """The ranks of a tensor-parallel group, as one of them sees it; all call the same methods in the same order.

    Attributes:
        leads: Whether this rank sends and receives for the others.
    """

    leads: bool

    def whole(self, shard: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the tensor that the ranks' shards were cut from, on the CPU."""

    def share(self, values: torch.Tensor) -> None:
        """Overwrite everybody's values with the first rank's; they are on the CPU."""

    def announce(self, number: int) -> int:
        """Return the first rank's number."""

    def sum_number(self, number: float) -> float:
        """Return the sum of every rank's ``number``."""


class CutLinear(nn.Module):
    """One device's shard of a linear layer.

    Attributes:
        shard: The layer that it computes.
        dimensions: Name of a parameter of the whole layer to the dimension along which it is cut; others are whole.
    """

    dimensions: ClassVar[Mapping[str, int]]

    def __init__(self, shard: nn.Linear, group: Group) -> None:
        super().__init__()
        self.shard = shard
        self._group = group


class ColumnLinear(CutLinear):
    """Some of the outputs, of all inputs."""

    dimensions: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        bias = None if whole.bias is None else _cut(whole.bias, 0, group)
        super().__init__(_linear(_cut(whole.weight, 0, group), bias), group)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Turn all inputs, ... x I, into this shard's outputs, ... x O/degree."""
        outputs: torch.Tensor = self.shard(self._group.enter(inputs))
        return outputs


class RowLinear(CutLinear):
    """All outputs, of some of the inputs: the bias is added once, after the sum."""

    dimensions: ClassVar[Mapping[str, int]] = {"weight": 1}

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        super().__init__(_linear(_cut(whole.weight, 1, group), None), group)
        self.bias = whole.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Turn this shard's inputs, ... x I/degree, into all outputs, ... x O."""
        outputs = self._group.total(self.shard(inputs))
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """What one device holds of a parameter.

    Attributes:
        name: Of the parameter in the whole layer.
        parameter: This device's.
        dimension: Along which it is cut; None if it is whole.
    """

    name: str
    parameter: nn.Parameter
    dimension: int | None


def cut_layer(layer: nn.Module, layout: Mapping[str, str], group: Group) -> None:
    """Put shards in the place of linear layers.

    Args:
        layer: Of the model; it is changed.
        layout: Names of submodules, each with how it is cut: `COLUMN` or `ROW`.
        group: Who computes them.
    """
    for name, how in layout.items():
        whole = layer.get_submodule(name)
        assert isinstance(whole, nn.Linear), "the layout was checked"
        path, _, last = name.rpartition(".")
        setattr(layer.get_submodule(path), last, (ColumnLinear if how == COLUMN else RowLinear)(whole, group))


def parts(layer: nn.Module) -> Iterator[Part]:
    """Give what one device holds of a layer, cut or not."""
    cuts = {name: module for name, module in layer.named_modules() if isinstance(module, CutLinear)}
    for name, parameter in layer.named_parameters():
        path, _, own = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        if last == "shard" and parent in cuts:
            yield Part(f"{parent}.{own}", parameter, cuts[parent].dimensions[own])
        else:
            yield Part(name, parameter, None)


def whole_parameters(layer: nn.Module, group: RankGroup | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the parameters of the whole layer with their names; of a layer that is cut, all ranks must ask for them."""
    for part in parts(layer):
        if part.dimension is None:
            yield part.name, part.parameter.detach()
        else:
            assert group is not None, "somebody has cut the layer"
            yield part.name, group.whole(part.parameter, part.dimension)


def squared_norm(layers: Iterable[nn.Module], group: RankGroup) -> float:
    """Return the squared Euclidean norm of the gradients of the layers: every shard's, and once what is whole."""
    whole: list[torch.Tensor] = []
    shards: list[torch.Tensor] = []
    for layer in layers:
        for part in parts(layer):
            if part.parameter.grad is not None:
                (whole if part.dimension is None else shards).append(part.parameter.grad)
    return group.sum_number(gradient_norm.squared_norm(shards)) + gradient_norm.squared_norm(whole)


def _cut(whole: torch.Tensor, dimension: int, group: Group) -> nn.Parameter:
    # A copy: a view would keep all of it.
    return nn.Parameter(group.shard(whole.detach(), dimension).clone(), requires_grad=whole.requires_grad)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made
