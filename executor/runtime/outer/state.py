"""The common parameters that pipelines move in outer steps, and the outer momentum, layer by layer, on the CPU."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from executor.recovery.checkpoint_file import LayerTensors
from executor.runtime.outer.pseudo_gradients import pack_layer, unpack_layer
from executor.training.compute import LayerParameters
from planner.plan.outer_step import OuterStep, part_of


@dataclass(slots=True)
class _Layer:
    """The outer state of a layer.

    Attributes:
        common: The common parameters.
        momentum: The outer momentum; None before the first outer step.
        mean: Mean pseudo-gradient of an outer step that is still to be taken; None if there is none.
        left_out: What compression has left out of the pseudo-gradients that were sent; None if nothing.
        left_out_of_mean: The same of the mean of this pipeline's part of the layer.
    """

    common: torch.Tensor
    momentum: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    left_out: torch.Tensor | None = None
    left_out_of_mean: torch.Tensor | None = None


_NAMES = tuple(each.name for each in fields(_Layer))


class OuterState:
    """The outer state of the layers that one rank exchanges with other pipelines, or merges for them.

    Every pipeline computes the outer step itself, with the same operations in the same order, so that the common
    parameters stay equal to the bit; or a syncer computes it for all of them.

    Args:
        parameters: Gives access to the parameters of a layer.
        layers: Indices of the layers.
        restored: The state of layers as `tensors` has returned it in an earlier run; the state of other layers begins
            with their present parameters.
    """

    def __init__(
        self,
        settings: OuterStep,
        parameters: Callable[[int], LayerParameters],
        layers: Iterable[int],
        restored: Mapping[int, LayerTensors],
    ) -> None:
        self._settings = settings
        self._parameters = parameters
        self._layers: dict[int, _Layer] = {}
        for layer in layers:
            if layer in restored:
                self.put(layer, restored[layer])
            else:
                self._layers[layer] = _Layer(parameters(layer).parameters())

    def put(self, layer: int, tensors: LayerTensors) -> None:
        """Begin with a layer, or go on with one, whose state is as `tensors` has returned it."""
        self._layers[layer] = _Layer(**{name: tensors[name].clone() for name in _NAMES if name in tensors})

    def keep(self, layers: Collection[int]) -> None:
        """Forget the state of all other layers, and what compression has left out of means: parts are others now."""
        self._layers = {layer: state for layer, state in self._layers.items() if layer in layers}
        for state in self._layers.values():
            state.left_out_of_mean = None

    def use(self, settings: OuterStep) -> None:
        """Go on with other settings; no pseudo-gradient may be under way."""
        self._settings = settings

    def pack(self, layer: int, parts: int = 1) -> list[torch.Tensor]:
        """Return so many equal parts of a layer's pseudo-gradient as they are sent, one-dimensional uint8 tensors."""
        own = self._layers[layer]
        values = own.common - self._parameters(layer).parameters()
        packed, own.left_out = self._packed(values, own.left_out, parts)
        return packed

    def average(self, layer: int, packed: Mapping[int, torch.Tensor], weights: Mapping[int, float]) -> None:
        """Average the pseudo-gradients of a layer for the next outer step.

        Args:
            layer: Index of the layer.
            packed: The pseudo-gradients as they were sent, by pipeline.
            weights: Weight of each pipeline in the mean.
        """
        own = self._layers[layer]
        own.mean = self._mean(packed, weights, own.common.numel())

    def average_part(
        self, layer: int, part: int, packed: Mapping[int, torch.Tensor], weights: Mapping[int, float]
    ) -> torch.Tensor:
        """Return the mean of one part of a layer as it is sent.

        Args:
            layer: Index of the layer.
            part: Index of the part, of as many as there are pipelines.
            packed: This part of the pseudo-gradients as they were sent, by pipeline.
            weights: Weight of each pipeline in the mean.
        """
        own = self._layers[layer]
        start, end = part_of(own.common.numel(), part, len(weights))
        mean, left_out = self._mean(packed, weights, end - start), own.left_out_of_mean
        if left_out is not None and len(left_out) != len(mean):
            # It is from a checkpoint or copy of another number of pipelines.
            left_out = None
        (sent,), own.left_out_of_mean = self._packed(mean, left_out, 1)
        return sent

    def join(self, layer: int, means: Mapping[int, torch.Tensor], parts: int) -> None:
        """Set the mean for the next outer step of a layer, from those of its parts as they were sent.

        A part without parameters may be missing.
        """
        own, nothing = self._layers[layer], torch.zeros(0, dtype=torch.uint8)
        own.mean = self._joined([means.get(part, nothing) for part in range(parts)], own.common.numel())

    def _packed(
        self, values: torch.Tensor, left_out: torch.Tensor | None, parts: int
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Return parts of values to send, to which what was left out before is added; and what is left out now."""
        settings, count = self._settings, values.numel()
        if left_out is not None:
            values += left_out * settings.feedback
        packed = [pack_layer(settings, values[slice(*part_of(count, part, parts))]) for part in range(parts)]
        return packed, None if settings.is_lossless else values - self._joined(packed, count)

    def _joined(self, parts: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
        bounds = (part_of(elements, part, len(parts)) for part in range(len(parts)))
        sizes = [end - start for start, end in bounds]
        return torch.cat([unpack_layer(self._settings, *each) for each in zip(parts, sizes, strict=True)])

    def _mean(self, packed: Mapping[int, torch.Tensor], weights: Mapping[int, float], elements: int) -> torch.Tensor:
        weighted = [
            unpack_layer(self._settings, packed[pipeline], elements) * weights[pipeline] for pipeline in sorted(packed)
        ]
        return sum(weighted[1:], weighted[0])

    def has_mean(self, layer: int) -> bool:
        """Return whether the mean pseudo-gradient of the next outer step is known."""
        return self._layers[layer].mean is not None

    def step(self, layer: int) -> None:
        """Take the outer step of a layer with its mean pseudo-gradient, and update this rank's parameters."""
        self.take_over(layer, self.advance(layer))

    def advance(self, layer: int, share: float = 1.0) -> torch.Tensor:
        """Take the outer step of a layer with its mean pseudo-gradient; return the new common parameters.

        With a ``share`` below 1 it is a part of one: parts with the same mean, whose shares add up to 1, are together
        a whole outer step.
        """
        settings, own = self._settings, self._layers[layer]
        assert own.mean is not None, layer
        mean, before, beta = own.mean, own.momentum, settings.momentum
        if share == 1:
            own.momentum = mean if before is None else before * beta + mean
            own.common = own.common - (mean + own.momentum * beta) * settings.learning_rate
        else:
            # The momentum of many outer steps with one mean is mean / (1 - beta); so much of the way there is a part.
            way = 1 - beta**share
            of_mean = (share - way * beta**2 / (1 - beta)) / (1 - beta)
            moved, momentum = mean * of_mean, mean * (way / (1 - beta))
            if before is not None:
                moved += before * (way * beta**2 / (1 - beta))
                momentum += before * beta**share
            own.momentum, own.common = momentum, own.common - moved * settings.learning_rate
        own.mean = None
        return own.common

    def take_over(self, layer: int, common: torch.Tensor) -> None:
        """Replace the common parameters of a layer, and mix this rank's own with them."""
        self._layers[layer].common = common
        parameters, mixing = self._parameters(layer), self._settings.mixing
        if mixing:
            common = parameters.parameters() * mixing + common * (1 - mixing)
        parameters.put_parameters(common)

    def follow(self, layer: int, common: torch.Tensor) -> None:
        """Replace the common parameters of a layer, and move this rank's own as far as they have moved."""
        own, parameters = self._layers[layer], self._parameters(layer)
        parameters.put_parameters(parameters.parameters() + (common - own.common))
        own.common = common

    def replace(self, layer: int, common: torch.Tensor) -> None:
        """Replace the common parameters of a layer and this rank's own."""
        self._layers[layer].common = common
        self._parameters(layer).put_parameters(common)

    def common(self, layer: int) -> torch.Tensor:
        """Return the common parameters of a layer, which nobody must change."""
        return self._layers[layer].common

    def tensors(self, layer: int) -> LayerTensors:
        """Return a copy of the state of a layer by the names of `_Layer`, without what is None; empty before `put`."""
        found = {name: getattr(self._layers.get(layer), name, None) for name in _NAMES}
        return {name: each.clone() for name, each in found.items() if each is not None}


class WithoutGradients:
    """What `executor.runtime.interpreter.Updates` need not do where pipelines exchange no gradients."""

    def settles(self, step: int) -> bool:
        """Return False: checkpoints hold what pipelines have not exchanged yet."""
        return False

    def settle(self, step: int) -> bool:
        """Do nothing."""
        return False

    def add(self, step: int) -> None:
        """Do nothing, since no gradients are received."""

    def accumulate(self) -> None:
        """Do nothing, since gradients are not sent."""


class NoOuterState:
    """Zeros in place of the pseudo-gradients of `OuterState`, for paced compute; they take no memory.

    Args:
        elements: Returns the number of parameters of a layer.
    """

    def __init__(self, settings: OuterStep, elements: Callable[[int], int]) -> None:
        self._settings = settings
        self._elements = elements

    def use(self, settings: OuterStep) -> None:
        """Go on with other settings, as `OuterState.use`."""
        self._settings = settings

    def put(self, layer: int, tensors: LayerTensors) -> None:
        """Do nothing, since there is no state."""

    def keep(self, layers: Collection[int]) -> None:
        """Do nothing, as `put`."""

    def pack(self, layer: int, parts: int = 1) -> list[torch.Tensor]:
        """Return zeros."""
        return [self._zeros(layer, part, parts) for part in range(parts)]

    def average(self, layer: int, packed: Mapping[int, torch.Tensor], weights: Mapping[int, float]) -> None:
        """Ignore the pseudo-gradients and their ``weights``."""

    def average_part(
        self, layer: int, part: int, packed: Mapping[int, torch.Tensor], weights: Mapping[int, float]
    ) -> torch.Tensor:
        """Return zeros, whatever the ``weights``."""
        return self._zeros(layer, part, len(weights))

    def join(self, layer: int, means: Mapping[int, torch.Tensor], parts: int) -> None:
        """Ignore the means."""

    def _zeros(self, layer: int, part: int, parts: int) -> torch.Tensor:
        size_bytes = self._settings.part_bytes(self._elements(layer), part, parts)
        return torch.zeros(1, dtype=torch.uint8).expand(size_bytes)

    def has_mean(self, layer: int) -> bool:
        """Return False."""
        return False

    def step(self, layer: int) -> None:
        """Do nothing, since there are no parameters."""

    def advance(self, layer: int, share: float = 1.0) -> None:
        """Do nothing."""

    def take_over(self, layer: int, common: torch.Tensor) -> None:
        """Do nothing, since there are no parameters."""

    def follow(self, layer: int, common: torch.Tensor) -> None:
        """Do nothing, as `take_over`."""

    def replace(self, layer: int, common: torch.Tensor) -> None:
        """Do nothing, as `take_over`."""

    def common(self, layer: int) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(1).expand(self._elements(layer))

    def tensors(self, layer: int) -> LayerTensors:
        """Return nothing."""
        return {}
