"""Parameters, gradients and whole states of layers as one-dimensional tensors, as they are summed, sent and stored."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from executor.training.optimizer import UpdateRule


class FlatParameters:
    """The parameters of layers in order as one-dimensional float32 tensors on the CPU.

    Frozen parameters keep their place in a tensor, and are never written.

    A parameter that took no part in a step has no gradient, and the update must not change it, neither by weight decay
    nor by momentum. So that this is known after a sum too, its part of the tensor is all -0.0, which only results from
    adding -0.0 to -0.0; gradients of zero are +0.0 here. A subtraction loses the mark, and the gradient is then zero.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self._parameters)

    def gradients(self) -> torch.Tensor:
        """Return the gradients; -0.0 where a parameter has none."""
        flat = _flatten([torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters])
        # Turns -0.0 into +0.0.
        flat += 0.0
        for parameter, part in self._parts(flat):
            if parameter.grad is None:
                part.fill_(-0.0)
        return flat

    def put_gradients(self, values: torch.Tensor) -> None:
        """Replace the gradients; a parameter without one stays without where ``values`` has none."""
        for parameter, part in self._trained(values):
            if parameter.grad is not None:
                parameter.grad.copy_(part)
            elif not _is_none(part):
                parameter.grad = part.to(parameter.device, copy=True)

    def add_gradients(self, values: torch.Tensor) -> None:
        """Add to the gradients; a parameter without one stays without where ``values`` has none."""
        for parameter, part in self._trained(values):
            if parameter.grad is not None:
                parameter.grad.add_(part.to(parameter.device))
            elif not _is_none(part):
                parameter.grad = part.to(parameter.device, copy=True)

    def parameters(self) -> torch.Tensor:
        """Return a copy of the parameters."""
        return _flatten(self._parameters)

    def put_parameters(self, values: torch.Tensor) -> None:
        """Replace the parameters."""
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


def _is_none(part: torch.Tensor) -> bool:
    return not part.any() and bool(part.signbit().all())


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors:
        return torch.zeros(0)
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()


class LayerState:
    """The state of consecutive layers as a one-dimensional uint8 tensor on the CPU.

    It holds parameters, optimizer state and buffers. Its length follows from the layers and the kind of optimizer
    alone, so that a receiver knows it in advance.
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
        """Replace the state by one that was packed from equal layers."""
        tensors = self._tensors()
        parts = state.split_with_sizes([each.nbytes for each in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                # The copy is aligned to the element size, which a part need not be.
                tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))

    def _tensors(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for layer in self._layers:
            for parameter in layer.parameters():
                tensors += [parameter, *self._rule.state(parameter)]
            tensors += layer.buffers()
        return tensors


def model_state(layers: Iterable[nn.Module], optimizer: str) -> tuple[str, ...]:
    """Return a description of each layer's state; equal descriptions mean that one state can replace the other."""
    return tuple(f"{_describe(layer)} by {optimizer}" for layer in layers)


def _describe(layer: nn.Module) -> str:
    parts = [*layer.named_parameters(), *layer.named_buffers()]
    return ", ".join(f"{name} {list(part.shape)}" for name, part in parts) or "no parameters"
