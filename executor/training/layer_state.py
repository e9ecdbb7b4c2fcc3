"""What a layer is to whoever holds it next: its parameters, what the optimizer keeps of them, and its buffers."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from executor.training.optimizer import UpdateRule


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
        return sum(each.nbytes + self._rule.kept_bytes(each) for each in parameters) + buffers

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
                tensors += [parameter, *self._rule.kept(parameter)]
            tensors += layer.buffers()
        return tensors


def model_state(layers: Iterable[nn.Module], optimizer: str) -> tuple[str, ...]:
    """Return what the state of each layer consists of: equal where one model's can be another's."""
    return tuple(f"{_parts(layer)} by {optimizer}" for layer in layers)


def _parts(layer: nn.Module) -> str:
    parts = [*layer.named_parameters(), *layer.named_buffers()]
    return ", ".join(f"{name} {list(part.shape)}" for name, part in parts) or "no parameters"
