"""What a layer is to whoever holds it next: its parameters, what the optimizer keeps of them, and its buffers."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from executor.training.optimizer import UpdateRule


class FlatParameters:
    """Rows of float32 on the CPU, with every parameter of the layers in order.

    Frozen parameters keep their place in a row, and are never written.

    A parameter that took no part in a step has no gradient, and no update leaves its mark on it: neither weight decay
    nor momentum. So that this is known after a sum too, its part of a row is all -0.0, which only -0.0 added to -0.0
    gives; gradients of zero are +0.0 here. A part from which something was subtracted says it no more: then the
    gradient is zero.

    Args:
        layers: In the order of the model.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._parameters = [parameter for layer in layers for parameter in layer.parameters()]

    @property
    def elements(self) -> int:
        """Numbers in a row."""
        return sum(parameter.numel() for parameter in self._parameters)

    def gradients(self) -> torch.Tensor:
        """Return the gradients; -0.0 where a parameter has none."""
        row = _row([torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters])
        # Turns -0.0 into +0.0.
        row += 0.0
        for parameter, part in self._parts(row):
            if parameter.grad is None:
                part.fill_(-0.0)
        return row

    def put_gradients(self, row: torch.Tensor) -> None:
        """Replace the gradients; a parameter without one gets none if the row has none."""
        for parameter, part in self._trained(row):
            if parameter.grad is not None:
                parameter.grad.copy_(part)
            elif not _is_none(part):
                parameter.grad = part.to(parameter.device, copy=True)

    def add_gradients(self, row: torch.Tensor) -> None:
        """Add to the gradients; a parameter without one gets none if the row has none."""
        for parameter, part in self._trained(row):
            if parameter.grad is None:
                if not _is_none(part):
                    parameter.grad = part.to(parameter.device, copy=True)
            else:
                parameter.grad.add_(part.to(parameter.device))

    def parameters(self) -> torch.Tensor:
        """Return the parameters."""
        return _row(self._parameters)

    def put_parameters(self, row: torch.Tensor) -> None:
        """Replace the parameters."""
        with torch.no_grad():
            for parameter, part in self._trained(row):
                parameter.copy_(part)

    def _trained(self, row: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The parameters that are trained, each with its part of the row in its shape."""
        return ((parameter, part) for parameter, part in self._parts(row) if parameter.requires_grad)

    def _parts(self, row: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        parts = row.split_with_sizes([parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            yield parameter, part.view_as(parameter)


def _is_none(part: torch.Tensor) -> bool:
    return not part.any() and bool(part.signbit().all())


def _row(values: Sequence[torch.Tensor]) -> torch.Tensor:
    if not values:
        return torch.zeros(0)
    return torch.cat([value.detach().flatten() for value in values]).cpu()


class LayerState:
    """The state of consecutive layers as one row of bytes: uint8, one-dimensional, on the CPU.

    Its length follows from the layers and the kind of optimizer alone, so that a receiver knows it before.

    Args:
        layers: In the order of the model.
        rule: Updates their parameters.
    """

    def __init__(self, layers: Sequence[nn.Module], rule: UpdateRule) -> None:
        self._layers = layers
        self._rule = rule

    @property
    def size_bytes(self) -> int:
        """Of the row."""
        parameters = [each for layer in self._layers for each in layer.parameters()]
        buffers = sum(each.nbytes for layer in self._layers for each in layer.buffers())
        return sum(each.nbytes + self._rule.state_bytes(each) for each in parameters) + buffers

    def pack(self) -> torch.Tensor:
        """Return a copy of the state."""
        parts = [each.detach().cpu().reshape(-1).view(torch.uint8) for each in self._tensors()]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)

    def unpack(self, row: torch.Tensor) -> None:
        """Replace the state by one that was packed of equal layers."""
        tensors = self._tensors()
        parts = row.split_with_sizes([each.nbytes for each in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                # A part may begin anywhere, and numbers must begin at a multiple of their size.
                tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))

    def _tensors(self) -> list[torch.Tensor]:
        """The state itself, no copies."""
        tensors: list[torch.Tensor] = []
        for layer in self._layers:
            for parameter in layer.parameters():
                tensors += [parameter, *self._rule.state(parameter)]
            tensors += layer.buffers()
        return tensors


def model_state(layers: Iterable[nn.Module], optimizer: str) -> tuple[str, ...]:
    """Return what the state of each layer consists of: equal where one model's can be another's."""
    return tuple(f"{_parts(layer)} by {optimizer}" for layer in layers)


def _parts(layer: nn.Module) -> str:
    parts = [*layer.named_parameters(), *layer.named_buffers()]
    return ", ".join(f"{name} {list(part.shape)}" for name, part in parts) or "no parameters"
