"""Conversion of layers' parameters, gradients and states to one-dimensional tensors for sums, messages, files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from executor.training.optimizer import ARRAYS, COUNTERS, UpdateRule
from executor.training.tensor_parallel import Group, parameter_parts


class FlatParameters:
    """Reads and writes all parameters of some layers, or all gradients, as one-dimensional float32 tensors on the CPU.

    Frozen parameters (without ``requires_grad``) have a place in the tensor, but are never written.

    A parameter that took no part in a step has no gradient, and the optimizer must not change it, neither by weight
    decay nor by momentum. The tensor contains -0.0 for each of its elements, and +0.0 for gradients that are zero. A
    sum over replicas preserves this mark, since only -0.0 + -0.0 gives -0.0; a subtraction makes it a zero gradient.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> "FlatParameters":
        """Return access to some parameters instead of all those of layers."""
        made = cls([])
        made._parameters = list(parameters)
        return made

    @property
    def elements(self) -> int:
        """Number of elements of all parameters together."""
        return sum(parameter.numel() for parameter in self._parameters)

    def gradients(self) -> torch.Tensor:
        """Return a copy of the gradients; -0.0 for each element of a parameter without a gradient."""
        flat = _flatten([torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters])
        # Turns -0.0 into +0.0.
        flat += 0.0
        for parameter, part in self._parts(flat):
            if parameter.grad is None:
                part.fill_(-0.0)
        return flat

    def put_gradients(self, values: torch.Tensor) -> None:
        """Replace the gradients; a parameter without a gradient gets one unless its ``values`` are all -0.0."""
        for parameter, part in self._trained(values):
            if parameter.grad is not None:
                parameter.grad.copy_(part)
            elif not _is_none(part):
                parameter.grad = part.to(parameter.device, copy=True)

    def add_gradients(self, values: torch.Tensor) -> None:
        """Add to the gradients; a parameter without a gradient gets one unless its ``values`` are all -0.0."""
        for parameter, part in self._trained(values):
            if parameter.grad is not None:
                parameter.grad.add_(part.to(parameter.device))
            elif not _is_none(part):
                parameter.grad = part.to(parameter.device, copy=True)

    def parameters(self) -> torch.Tensor:
        """Return a copy of the parameters."""
        return _flatten(self._parameters)

    def put_parameters(self, values: torch.Tensor) -> None:
        """Replace the parameters, except those that are frozen."""
        with torch.no_grad():
            for parameter, part in self._trained(values):
                parameter.copy_(part)

    def _trained(self, values: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        return ((parameter, part) for parameter, part in self._parts(values) if parameter.requires_grad)

    def _parts(self, values: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with its part of ``values``, a view in the parameter's shape."""
        parts = values.split_with_sizes([parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            yield parameter, part.view_as(parameter)


class TiedCopies:
    """This rank's copies of a parameter that several layers share, whose gradients are those of one parameter.

    A missing gradient has the mark that `FlatParameters` describes.

    Attributes:
        parameters: The copies, one at least.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._copies = [FlatParameters.of([each]) for each in parameters]

    def add_up(self) -> None:
        """Give each copy the sum of the copies' gradients."""
        total, *others = [copy.gradients() for copy in self._copies]
        for other in others:
            total += other
        self.put_gradients(total)

    def gradients(self) -> torch.Tensor:
        """Return a copy of the gradient that `add_up` has given to each copy, one-dimensional float32 on the CPU."""
        return self._copies[0].gradients()

    def put_gradients(self, values: torch.Tensor) -> None:
        """Replace the gradient of each copy."""
        for copy in self._copies:
            copy.put_gradients(values)


def _is_none(part: torch.Tensor) -> bool:
    return not part.any() and bool(part.signbit().all())


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        return torch.zeros(0)
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()


class LayerState:
    """Packs parameters, optimizer state and buffers of layers into a one-dimensional uint8 tensor on the CPU.

    Its length depends only on the layers and the kind of optimizer, so that a receiver knows it in advance.
    """

    def __init__(self, layers: Sequence[nn.Module], rule: UpdateRule) -> None:
        self._layers = layers
        self._rule = rule

    @property
    def size_bytes(self) -> int:
        """Length of the packed state in bytes."""
        parameters = [each for layer in self._layers for each in layer.parameters()]
        buffers = sum(each.nbytes for layer in self._layers for each in layer.buffers())
        return sum(each.nbytes + self._rule.state_bytes(each) for each in parameters) + buffers

    def pack(self) -> torch.Tensor:
        """Return a copy of the state."""
        parts = [each.detach().cpu().reshape(-1).view(torch.uint8) for each in self._tensors()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)

    def unpack(self, state: torch.Tensor) -> None:
        """Load a state that `pack` returned for layers of the same shapes."""
        tensors = self._tensors()
        parts = state.split_with_sizes([each.nbytes for each in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                # A part may not be aligned to the element size, as `view` requires; its copy is.
                tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))

    def _tensors(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for layer in self._layers:
            for parameter in layer.parameters():
                tensors += [parameter, *self._rule.state(parameter)]
            tensors += layer.buffers()
        return tensors


def named_state(layer: nn.Module, optimizer: str, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a state that `LayerState.pack` has returned, in its order.

    A parameter and a buffer have their names in the unsharded layer; what the optimizer keeps for a parameter has the
    parameter's name and its own, as in ``weight:exp_avg``. Tensors of sharded layers are this device's parts.
    """
    shapes = _tensors_like_state(layer, optimizer)
    parts = state.split_with_sizes([each.nbytes for each in shapes.values()])
    # A part may not be aligned to the element size, as `view` requires; its copy is.
    return {
        name: part.clone().view(like.dtype).view(like.shape)
        for (name, like), part in zip(shapes.items(), parts, strict=True)
    }


def sharded_dimensions(layer: nn.Module, optimizer: str) -> dict[str, int]:
    """Return the names of `named_state` whose tensors are sharded, with the dimension."""
    return {
        name: part.dimension
        for part in parameter_parts(layer)
        if part.dimension is not None
        for name in (part.name, *(f"{part.name}:{array}" for array in ARRAYS[optimizer]))
    }


def packed_state(
    layer: nn.Module, optimizer: str, tensors: Mapping[str, torch.Tensor], group: Group | None
) -> torch.Tensor:
    """Return a state that `LayerState.unpack` can load into a layer, from unsharded tensors.

    ``tensors`` have the names of `named_state`. Of a layer that is sharded over ``group`` this device's part is packed.
    """
    dimensions = sharded_dimensions(layer, optimizer)
    parts = []
    for name in _tensors_like_state(layer, optimizer):
        tensor = tensors[name]
        if name in dimensions:
            assert group is not None, "only a group shards layers"
            tensor = group.shard(tensor, dimensions[name])
        parts.append(tensor.contiguous().reshape(-1).view(torch.uint8))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def _tensors_like_state(layer: nn.Module, optimizer: str) -> dict[str, torch.Tensor]:
    """Return tensors with the names of `named_state`, and with the shapes and types of the state's tensors."""
    like: dict[str, torch.Tensor] = {}
    counter = torch.zeros((), dtype=torch.float32)
    for part in parameter_parts(layer):
        like |= {part.name: part.parameter, **{f"{part.name}:{array}": part.parameter for array in ARRAYS[optimizer]}}
        like |= {f"{part.name}:{each}": counter for each in COUNTERS[optimizer]}
    return like | dict(layer.named_buffers())


def model_state(layers: Iterable[nn.Module], optimizer: str) -> tuple[str, ...]:
    """Return a text for each layer, none of them sharded, with the names and shapes of its state and the optimizer.

    A layer can load the state of another layer if their texts are equal.
    """
    return tuple(f"{_describe(layer)} by {optimizer}" for layer in layers)


def _describe(layer: nn.Module) -> str:
    parts = [*layer.named_parameters(), *layer.named_buffers()]
    return ", ".join(f"{name} {list(part.shape)}" for name, part in parts) or "no parameters"
