"""The optimizer's update of one rank's parameters, with gradient clipping."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from executor.training.tensor_parallel import TensorGroup, parameter_parts
from planner.scenario.training import Optimizer, Training

# The state that torch's optimizers keep for a parameter: arrays of its shape, and step counters.
ARRAYS = {"sgd": (), "momentum": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
COUNTERS = {"sgd": (), "momentum": (), "adamw": ("step",)}
_COUNTER_BYTES = 4

# Added to the norm, as in torch.nn.utils.clip_grad_norm_, so that clipping never divides by zero.
_SMALLEST_NORM = 1e-6


class UpdateRule:
    """The scenario's optimizer, with gradient clipping, over this rank's parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], training: Training) -> None:
        self._parameters = parameters
        self._settings = training.optimizer
        self._clip_norm = training.clip_norm
        self._optimizer = _make_optimizer(training.optimizer, parameters)

    def adopt(self, other: "UpdateRule") -> None:
        """Take over the optimizer state of the parameters that ``other`` and this rule both update."""
        known = other._optimizer.state
        self._optimizer.state.update({each: known[each] for each in self._parameters if each in known})

    def state_bytes(self, parameter: nn.Parameter) -> int:
        """Return the size of a parameter's optimizer state in bytes."""
        name = self._settings.name
        return len(ARRAYS[name]) * parameter.nbytes + len(COUNTERS[name]) * _COUNTER_BYTES

    def state(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        """Return the optimizer state of a parameter, not copied; zeros before its first update."""
        state, name = self._optimizer.state[parameter], self._settings.name
        for array in ARRAYS[name]:
            if array not in state:
                state[array] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for counter in COUNTERS[name]:
            if counter not in state:
                state[counter] = torch.zeros((), dtype=torch.float32)
        return [state[each] for each in (*ARRAYS[name], *COUNTERS[name])]

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def update(self, learning_rate: float, squared_norm: float | None) -> None:
        """Update the parameters from their gradients, after clipping these if the scenario says so.

        Args:
            learning_rate: The learning rate of the step.
            squared_norm: Squared norm of the gradients of all layers of the model; needed only for clipping.
        """
        if self._clip_norm is not None:
            assert squared_norm is not None, "clipping needs the norm over all stages"
            factor = min(self._clip_norm / (math.sqrt(squared_norm) + _SMALLEST_NORM), 1.0)
            # A NaN norm makes every gradient NaN, as in torch.
            for gradient in self._gradients() if factor != 1 else ():
                gradient.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def squared_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the squared Euclidean norm of gradients, computed in float64.

    A plan that groups layers into other stages adds the squares in another order. In float64 this changes the norm by
    a relative 1e-16 only, and so almost never the float32 factor by which gradients are clipped.
    """
    if not gradients:
        return 0.0
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    # Sum on the device, so that only one number is copied from it.
    return float(torch.stack(norms).square().sum())


def layers_squared_norm(
    layers: Iterable[nn.Module], group: TensorGroup | None, without: Iterable[nn.Parameter] = ()
) -> float:
    """Return the squared norm of the gradients of layers; a replicated parameter counts once."""
    left_out = set(map(id, without))
    replicated: list[torch.Tensor] = []
    shards: list[torch.Tensor] = []
    for layer in layers:
        for part in parameter_parts(layer):
            if part.parameter.grad is not None and id(part.parameter) not in left_out:
                (replicated if part.dimension is None else shards).append(part.parameter.grad)
    return squared_norm(replicated) + (group.sum_number(squared_norm(shards)) if group is not None else 0.0)


def _make_optimizer(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    # torch refuses an empty list, and a rank whose layers have no parameters still takes steps.
    parameters = parameters or [nn.Parameter(torch.zeros(0))]
    if optimizer.name == "adamw":
        return torch.optim.AdamW(parameters, lr=optimizer.learning_rate, weight_decay=optimizer.weight_decay)
    momentum = optimizer.momentum if optimizer.name == "momentum" else 0.0
    return torch.optim.SGD(
        parameters, lr=optimizer.learning_rate, momentum=momentum, weight_decay=optimizer.weight_decay
    )
