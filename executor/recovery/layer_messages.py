"""Messages with the state of layers, and with that of their outer steps where pipelines meet in outer steps.

The outer state of a layer follows the state of all layers of the message, as float32 values: the common parameters, the
outer momentum and the mean of an outer step that is still to be taken, each with zeros if there is none, and 1 if there
is such a mean. Without a momentum the next outer step is that with a momentum of zeros. What compression has left out
stays with the worker that has left it out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from executor.recovery.checkpoint_file import LayerTensors
from executor.training.real_compute import Compute, RealCompute
from planner.adapt.migration import LayerTransfer
from planner.adapt.worker_moves import OUTER_MARKS, outer_state_bytes
from planner.scenario.scenario import Scenario

_COMMON, _MOMENTUM, _MEAN = "common", "momentum", "mean"


@dataclass(frozen=True, slots=True)
class LayerMessages:
    """Packs and loads the state of layers.

    Args:
        compute: Has the layers of this rank. Paced compute has none: its messages are zeros of the planned size.
    """

    _scenario: Scenario
    _compute: Compute

    def size_bytes(self, move: LayerTransfer) -> int:
        """Return the bytes of the message of a transfer."""
        own_bytes = self._compute.state_bytes(move)
        return own_bytes + outer_state_bytes(self._scenario, *_bounds(move)) if self._has_outer(move) else own_bytes

    def pack(
        self, move: LayerTransfer, state: torch.Tensor, outer: Callable[[], Mapping[int, LayerTensors]]
    ) -> torch.Tensor:
        """Return a message.

        Args:
            move: The layers to send, and between which devices.
            state: The state of its layers, a one-dimensional uint8 tensor.
            outer: Returns the outer state of these layers, and of others.
        """
        if not isinstance(self._compute, RealCompute):
            return self._compute.layer_state(move)
        if not self._has_outer(move):
            return state
        states = outer()
        return torch.cat([state, *(_packed(states[layer]) for layer in move.layers)])

    def load(self, move: LayerTransfer, message: torch.Tensor) -> dict[int, LayerTensors]:
        """Load the layers of a message, and return their outer state; it is empty if the message has none."""
        if not self._has_outer(move):
            self._compute.put_layer_state(move, message)
            return {}
        own_bytes = self._compute.state_bytes(move)
        self._compute.put_layer_state(move, message[:own_bytes])
        sizes = [outer_state_bytes(self._scenario, layer, layer + 1) for layer in move.layers]
        # A part may not be aligned to the element size, as `view` requires; its copy is.
        parts = [each.clone().view(torch.float32) for each in message[own_bytes:].split_with_sizes(sizes)]
        return {layer: _unpacked(part) for layer, part in zip(move.layers, parts, strict=True)}

    def _has_outer(self, move: LayerTransfer) -> bool:
        return isinstance(self._compute, RealCompute) and move.has_outer_state


def _bounds(move: LayerTransfer) -> tuple[int, int]:
    return move.first_layer, move.end_layer


def _packed(outer: LayerTensors) -> torch.Tensor:
    common = outer[_COMMON]
    momentum, mean = (outer.get(name, torch.zeros_like(common)) for name in (_MOMENTUM, _MEAN))
    has_mean = torch.full((OUTER_MARKS,), float(_MEAN in outer))
    return torch.cat([common, momentum, mean, has_mean]).view(torch.uint8)


def _unpacked(values: torch.Tensor) -> LayerTensors:
    *parts, has_mean = values.tensor_split([len(values) // 3, 2 * (len(values) // 3), len(values) - OUTER_MARKS])
    common, momentum, mean = (part.clone() for part in parts)
    found = {_COMMON: common, _MOMENTUM: momentum}
    return {**found, _MEAN: mean} if has_mean.item() else found
