"""The common parameters that pipelines move in outer steps, and the outer momentum, layer by layer, on the CPU."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from executor.runtime.pseudo_gradients import pack_layer, unpack_layer
from executor.training.compute import LayerParameters
from planner.plan.outer_step import OuterStep

# The state of a layer by name: one-dimensional float32 tensors with an element for each of the layer's parameters.
OuterTensors = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class _Layer:
    """The outer state of a layer.

    Attributes:
        common: The common parameters.
        momentum: The outer momentum.
        mean: Mean pseudo-gradient of an outer step that is still to be taken; None if there is none.
        left_out: What compression has left out of the pseudo-gradients that were sent; None if nothing.
    """

    common: torch.Tensor
    momentum: torch.Tensor
    mean: torch.Tensor | None = None
    left_out: torch.Tensor | None = None


class OuterState:
    """The outer state of the layers that one rank exchanges with other pipelines.

    Every pipeline computes the outer step itself, with the same operations in the same order, so that the common
    parameters stay equal to the bit.

    Args:
        weights: Weight of each pipeline in the mean.
        parameters: Gives access to the parameters of a layer.
        layers: Indices of the layers.
        restored: The state of layers as `tensors` has returned it in an earlier run; the state of other layers begins
            with their present parameters.
    """

    def __init__(
        self,
        settings: OuterStep,
        weights: Sequence[float],
        parameters: Callable[[int], LayerParameters],
        layers: Iterable[int],
        restored: Mapping[int, OuterTensors],
    ) -> None:
        self._settings = settings
        self._weights = weights
        self._parameters = parameters
        self._layers: dict[int, _Layer] = {}
        for layer in layers:
            if layer in restored:
                self._layers[layer] = _Layer(**{name: each.clone() for name, each in restored[layer].items()})
            else:
                common = parameters(layer).parameters()
                self._layers[layer] = _Layer(common, torch.zeros_like(common))

    def pack(self, layer: int) -> torch.Tensor:
        """Return a layer's pseudo-gradient as it is sent, a one-dimensional uint8 tensor."""
        settings, own = self._settings, self._layers[layer]
        values = own.common - self._parameters(layer).parameters()
        if settings.is_lossless:
            return pack_layer(settings, values)
        if own.left_out is not None:
            values += own.left_out * settings.feedback
        packed = pack_layer(settings, values)
        own.left_out = values - unpack_layer(settings, packed, values.numel())
        return packed

    def average(self, layer: int, packed: Mapping[int, torch.Tensor]) -> None:
        """Average the pseudo-gradients of a layer, as they were sent by each pipeline, for the next outer step."""
        own = self._layers[layer]
        weighted = [
            unpack_layer(self._settings, packed[pipeline], own.common.numel()) * self._weights[pipeline]
            for pipeline in sorted(packed)
        ]
        own.mean = sum(weighted[1:], weighted[0])

    def has_mean(self, layer: int) -> bool:
        """Return whether the mean pseudo-gradient of the next outer step is known."""
        return self._layers[layer].mean is not None

    def step(self, layer: int) -> None:
        """Take the outer step of a layer with its mean pseudo-gradient, and update this rank's parameters."""
        settings, own = self._settings, self._layers[layer]
        assert own.mean is not None, layer
        own.momentum = own.momentum * settings.momentum + own.mean
        own.common = own.common - (own.mean + own.momentum * settings.momentum) * settings.learning_rate
        own.mean = None
        parameters = self._parameters(layer)
        mixed = own.common
        if settings.mixing:
            mixed = parameters.parameters() * settings.mixing + own.common * (1 - settings.mixing)
        parameters.put_parameters(mixed)

    def tensors(self, layer: int) -> OuterTensors:
        """Return a copy of the state of a layer by the names of `_Layer`, without what is None."""
        own = self._layers[layer]
        found = {"common": own.common, "momentum": own.momentum, "mean": own.mean, "left_out": own.left_out}
        return {name: each.clone() for name, each in found.items() if each is not None}


class NoOuterState:
    """Zeros in place of the pseudo-gradients of `OuterState`, for paced compute; they take no memory."""

    def __init__(self, packed_bytes: Callable[[int], int]) -> None:
        self._packed_bytes = packed_bytes

    def pack(self, layer: int) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(1, dtype=torch.uint8).expand(self._packed_bytes(layer))

    def average(self, layer: int, packed: Mapping[int, torch.Tensor]) -> None:
        """Ignore the pseudo-gradients."""

    def has_mean(self, layer: int) -> bool:
        """Return False."""
        return False

    def step(self, layer: int) -> None:
        """Do nothing, since there are no parameters."""

    def tensors(self, layer: int) -> OuterTensors:
        """Return nothing."""
        return {}
