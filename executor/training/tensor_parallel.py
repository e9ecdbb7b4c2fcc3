"""Tensor parallelism: pairs of linear layers sharded over a group of devices, as in Megatron-LM (arXiv 1909.08053).

The first layer of a pair is sharded along its outputs (``column``), the second along its inputs (``row``), and the
group sums the outputs of the second; operations between the two work on a shard. A shard is an ordinary layer with
ordinary parameters, so code that splits a backward, updates parameters or sums gradients needs no special cases.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from executor.core.failures import blaming
from executor.training.data.order import NO_TARGET
from executor.training.models.trainable import COLUMN, ROW, SUMMED, VOCABULARY
from executor.transport.rendezvous import WITH_NCCL
from planner.plan.plan import Plan


class Group(Protocol):
    """The operations of sharded layers: those of a `TensorGroup`, or stand-ins on a single device."""

    @property
    def degree(self) -> int:
        """Number of devices."""

    def shard(self, full: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return this device's part of a tensor that all devices hold, split along a dimension."""

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs unchanged; in backward, sum their gradients over the devices."""

    def total(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the sum of the outputs over the devices; in backward, return the gradient unchanged."""

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest value of each element over the devices, without a gradient."""


class TensorGroup:
    """One rank's access to its tensor-parallel group; all its ranks must call the same methods in the same order.

    The messages of a group stay inside a host. Profiled times of shards include them, so they are not logged.

    Args:
        group: The process group of exactly these ranks, used for nothing else.
        devices: Names of the group's devices in rank order; the first one leads.
        where: Where `broadcast` expects its tensors: on the GPU if NCCL connects the group, else on the CPU.

    Attributes:
        leads: Whether this rank sends and receives for the others.
        device: The device that ``where`` has named.
    """

    def __init__(self, group: dist.ProcessGroup, devices: Sequence[str], device: str, where: torch.device) -> None:
        self._group = group
        self.device = where
        self._degree = len(devices)
        self._index = devices.index(device)
        self.leads = device == devices[0]
        self._peers = ", ".join(name for name in devices if name != device)

    @property
    def degree(self) -> int:
        """Number of devices."""
        return self._degree

    def shard(self, full: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return this rank's part of a tensor that all ranks hold, split along a dimension."""
        # Every rank has built the model from the same seed, so that nothing needs to be sent.
        return full.chunk(self._degree, dimension)[self._index]

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs unchanged; in backward, sum their gradients over the ranks."""
        entered: torch.Tensor = _SumGradients.apply(inputs, self)  # type: ignore[no-untyped-call]
        return entered

    def total(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the sum of the outputs over the ranks; in backward, return the gradient unchanged."""
        summed: torch.Tensor = _SumOutputs.apply(outputs, self)  # type: ignore[no-untyped-call]
        return summed

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest value of each element over the ranks, without a gradient."""
        return self.all_reduce(values, dist.ReduceOp.MAX)

    def all_reduce(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Return the sum, or the maximum, of ``values`` over the ranks, in a new tensor."""
        total = values.detach().clone(memory_format=torch.contiguous_format)
        with blaming(self._peers):
            dist.all_reduce(total, op=how, group=self._group)
        return total

    def gather(self, shard: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the full tensor of the ranks' shards, on the CPU."""
        own = shard.detach().cpu().contiguous()
        shards = [torch.empty_like(own) for _ in range(self._degree)]
        with blaming(self._peers):
            dist.all_gather(shards, own, group=self._group)
        return torch.cat(shards, dimension)

    def broadcast(self, values: torch.Tensor) -> None:
        """Overwrite ``values``, on the CPU or on `device`, on every rank with those of the group's first rank."""
        with blaming(self._peers):
            dist.broadcast(values, group=self._group, group_src=0)

    def broadcast_number(self, number: int) -> int:
        """Return the ``number`` that the first rank of the group has given, on every rank."""
        values = torch.tensor([number])
        self.broadcast(values)
        return int(values)

    def sum_number(self, number: float) -> float:
        """Return the sum of every rank's ``number``."""
        return float(self.all_reduce(torch.tensor([number], dtype=torch.float64)))


def form_group(
    plan: Plan, device: str, timeout: timedelta, where: torch.device, uses_nccl: Callable[[Sequence[str]], bool]
) -> TensorGroup | None:
    """Form all tensor-parallel groups of a plan; return the group of this rank's device, or None if it is in no group.

    Every rank must call this function.

    Args:
        plan: The plan, whose groups stay during the run.
        device: Name of this rank's device.
        timeout: How long a rank waits for another rank of its group at most.
        where: The torch device on which this rank computes.
        uses_nccl: Returns whether NCCL connects the group of these devices, the same on all ranks.
    """
    own = None
    for devices in dict.fromkeys(replica.devices for replica in plan.replicas if replica.partners):
        ranks = [plan.devices.index(name) for name in devices]
        nccl = uses_nccl(devices)
        with blaming():
            formed = dist.new_group(ranks, timeout=timeout, backend=WITH_NCCL if nccl else "gloo")
        if device in devices:
            assert formed is not None
            own = TensorGroup(formed, devices, device, where if nccl else torch.device("cpu"))
    return own


class _SumGradients(torch.autograd.Function):
    """The operator f of Megatron-LM: the identity in forward, an all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(gradients[0]), None


class _SumOutputs(torch.autograd.Function):
    """The operator g of Megatron-LM: an all-reduce in forward, the identity in backward."""

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.all_reduce(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class ShardedModule(nn.Module):
    """One device's shard of a module.

    Attributes:
        dimensions: For each sharded parameter, by name, the dimension along which it is split.
    """

    dimensions: ClassVar[Mapping[str, int]]

    def __init__(self, shard: nn.Module, group: Group) -> None:
        super().__init__()
        self.shard = shard
        self._group = group


class ColumnLinear(ShardedModule):
    """Computes this device's part of a linear layer's outputs from all inputs."""

    dimensions: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, full: nn.Linear, group: Group) -> None:
        bias = None if full.bias is None else _shard(full.bias, 0, group)
        super().__init__(_linear(_shard(full.weight, 0, group), bias), group)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this device's outputs, shape (..., out_features / degree), from inputs (..., in_features)."""
        outputs: torch.Tensor = self.shard(self._group.enter(inputs))
        return outputs


class RowLinear(ShardedModule):
    """Computes all outputs of a linear layer as a sum over the devices, each of which has a part of the inputs."""

    dimensions: ClassVar[Mapping[str, int]] = {"weight": 1}

    def __init__(self, full: nn.Linear, group: Group) -> None:
        super().__init__(_linear(_shard(full.weight, 1, group), None), group)
        self.bias = full.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return all outputs, shape (..., out_features), from this device's inputs (..., in_features / degree)."""
        outputs = self._group.total(self.shard(inputs))
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


class RowsEmbedding(ShardedModule):
    """Looks up the tokens of this device's rows of a table, and sums the embeddings over the devices."""

    dimensions: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(self, whole: nn.Embedding, group: Group) -> None:
        first, rows = _own_rows(whole.num_embeddings, group)
        padding = -1 if whole.padding_idx is None else whole.padding_idx - first
        own_padding = padding if 0 <= padding < rows else None
        shard = nn.Embedding(rows, whole.embedding_dim, own_padding, device="meta")
        shard.weight = _shard(whole.weight, 0, group)
        super().__init__(shard, group)
        self._first, self._rows = first, rows

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens, shape (..., embedding_dim)."""
        own, is_own = _own_places(tokens, self._first, self._rows)
        found = self.shard(own)
        return self._group.total(found * is_own.unsqueeze(-1).to(found.dtype))


class RowsLinear(ShardedModule):
    """Computes the scores of this device's rows of a matrix; `cross_entropy` is over the rows of all devices."""

    dimensions: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        bias = None if whole.bias is None else _shard(whole.bias, 0, group)
        super().__init__(_linear(_shard(whole.weight, 0, group), bias), group)
        self._first, _ = _own_rows(whole.out_features, group)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this device's scores, shape (..., out_features / degree), from inputs (..., in_features)."""
        scores: torch.Tensor = self.shard(self._group.enter(inputs))
        return scores

    def cross_entropy(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy over all rows, from this device's scores (count, own rows) and targets.

        Targets that are `NO_TARGET` do not count.
        """
        shifted = scores - self._group.largest(scores.amax(-1)).unsqueeze(-1)
        own, is_own = _own_places(targets, self._first, scores.shape[-1])
        score = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1) * is_own.to(scores.dtype)
        # One message for both sums.
        sums, score = self._group.total(torch.stack((shifted.exp().sum(-1), score))).unbind()
        counted = targets != NO_TARGET
        return ((sums.log() - score) * counted).sum() / counted.sum()


class SummedModule(ShardedModule):
    """A replicated module that works on a part of the values, such as a norm of each head; its gradients are summed."""

    dimensions: ClassVar[Mapping[str, int]] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the module's outputs."""
        entered = {name: self._group.enter(parameter) for name, parameter in self.shard.named_parameters()}
        outputs: torch.Tensor = functional_call(self.shard, entered, (inputs,))
        return outputs


def _own_rows(rows: int, group: Group) -> tuple[int, int]:
    """Return the first of this device's rows, and their number."""
    own = group.shard(torch.arange(rows, device="cpu"), 0)
    return int(own[0]), len(own)


def _own_places(numbers: torch.Tensor, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of numbers among this device's rows, 0 where another device has the row, and where not."""
    own = numbers - first
    is_own = (own >= 0) & (own < rows)
    return own.where(is_own, 0), is_own


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """The part of a parameter that one device holds.

    Attributes:
        name: Name of the parameter in the unsharded layer.
        dimension: The dimension along which the parameter is sharded; None if the device holds all of it.
    """

    name: str
    parameter: nn.Parameter
    dimension: int | None


def shard_layer(layer: nn.Module, layout: Mapping[str, str], group: Group) -> None:
    """Replace submodules of a layer by shards, as ``layout`` says; see `TensorParallelModel.parallel_layout`.

    A table whose rows the number of devices does not divide is replicated.
    """
    for name, split in layout.items():
        parent, _, own = name.rpartition(".")
        setattr(layer.get_submodule(parent), own, _sharded(layer.get_submodule(name), split, group))


def _sharded(full: nn.Module, split: str, group: Group) -> nn.Module:
    if split == SUMMED:
        return SummedModule(full, group)
    if split == VOCABULARY and table_rows(full) % group.degree:
        return full
    if isinstance(full, nn.Embedding):
        assert split == VOCABULARY, "the layout was checked"
        return RowsEmbedding(full, group)
    assert isinstance(full, nn.Linear), "the layout was checked"
    return {COLUMN: ColumnLinear, ROW: RowLinear, VOCABULARY: RowsLinear}[split](full, group)


def table_rows(table: nn.Module) -> int:
    """Return the number of rows of an embedding or of a linear layer."""
    assert isinstance(table, nn.Embedding | nn.Linear), "the layout was checked"
    return table.num_embeddings if isinstance(table, nn.Embedding) else table.out_features


def parameter_parts(layer: nn.Module) -> Iterator[ParameterPart]:
    """Yield the part of each parameter of a layer that this device holds; the layer may be sharded or not."""
    sharded = {name: module for name, module in layer.named_modules() if isinstance(module, ShardedModule)}
    for name, parameter in layer.named_parameters():
        path, _, own = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        if last == "shard" and parent in sharded:
            yield ParameterPart(f"{parent}.{own}", parameter, sharded[parent].dimensions.get(own))
        else:
            yield ParameterPart(name, parameter, None)


def full_parameters(layer: nn.Module, group: TensorGroup | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and unsharded value of each parameter of a layer; all ranks of ``group`` must do so together."""
    for part in parameter_parts(layer):
        if part.dimension is None:
            yield part.name, part.parameter.detach()
        else:
            assert group is not None, "only a group shards layers"
            yield part.name, group.gather(part.parameter, part.dimension)


def _shard(full: torch.Tensor, dimension: int, group: Group) -> nn.Parameter:
    # A view would keep the full tensor alive.
    return nn.Parameter(group.shard(full.detach(), dimension).clone(), requires_grad=full.requires_grad)


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made
