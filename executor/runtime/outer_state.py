"""The common parameters that pipelines move in outer steps, and the outer momentum, layer by layer, on the CPU."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

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
    """

    common: torch.Tensor
    momentum: torch.Tensor
    mean: torch.Tensor | None = None


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

    def pseudo_gradient(self, layer: int) -> torch.Tensor:
        """Return the common parameters of a layer minus this rank's."""
        return self._layers[layer].common - self._parameters(layer).parameters()

    def average(self, layer: int, parts: Mapping[int, torch.Tensor]) -> None:
        """Average the pseudo-gradients of a layer, given by pipeline, for the next outer step."""
        weighted = [parts[pipeline] * self._weights[pipeline] for pipeline in sorted(parts)]
        self._layers[layer].mean = sum(weighted[1:], weighted[0])

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
        """Return a copy of the state of a layer; the mean is part of it only if an outer step is still to be taken."""
        own = self._layers[layer]
        found = {"common": own.common.clone(), "momentum": own.momentum.clone()}
        return found if own.mean is None else {**found, "mean": own.mean.clone()}


class NoOuterState:
    """Zeros in place of the pseudo-gradients of `OuterState`, for paced compute; they take no memory."""

    def __init__(self, elements: Callable[[int], int]) -> None:
        self._elements = elements

    def pseudo_gradient(self, layer: int) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(1).expand(self._elements(layer))

    def average(self, layer: int, parts: Mapping[int, torch.Tensor]) -> None:
        """Ignore the pseudo-gradients."""

    def has_mean(self, layer: int) -> bool:
        """Return False."""
        return False

    def step(self, layer: int) -> None:
        """Do nothing, since there are no parameters."""

    def tensors(self, layer: int) -> OuterTensors:
        """Return nothing."""
        return {}
