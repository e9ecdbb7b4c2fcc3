"""The optimizer's update of one rank's parameters: learning rate by the step, gradients clipped by the whole norm."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from executor.training.tensor_parallel.gradient_norm import squared_norm
from planner.scenario.scenario import Optimizer, Training

# What torch's optimizers keep of a parameter: arrays of its shape, and a number of steps.
_ARRAYS = {"sgd": (), "momentum": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}
_COUNTS = {"sgd": (), "momentum": (), "adamw": ("step",)}
_COUNT_BYTES = 4

# As in torch.nn.utils.clip_grad_norm_: clipping stops short of dividing by zero.
_SMALLEST_NORM = 1e-6


class UpdateRule:
    """The scenario's optimizer over parameters.

    Args:
        parameters: Of this rank.
        training: Has the optimizer, its schedule, and the norm to clip to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], training: Training) -> None:
        self._parameters = parameters
        self._rule = training.optimizer
        self._clip_norm = training.clip_norm
        self._optimizer = _make_optimizer(training.optimizer, parameters)

    def adopt(self, other: "UpdateRule") -> None:
        """Go on with what another rule of the same kind has kept of parameters that are this one's too."""
        known = other._optimizer.state
        self._optimizer.state.update({each: known[each] for each in self._parameters if each in known})

    def kept_bytes(self, parameter: nn.Parameter) -> int:
        """Return the bytes of what `kept` returns."""
        return len(_ARRAYS[self._rule.name]) * parameter.nbytes + len(_COUNTS[self._rule.name]) * _COUNT_BYTES

    def kept(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        """Return what the optimizer keeps of a parameter, not copied; of one without an update yet it is zero."""
        state = self._optimizer.state[parameter]
        for name in _ARRAYS[self._rule.name]:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for name in _COUNTS[self._rule.name]:
            if name not in state:
                state[name] = torch.zeros((), dtype=torch.float32)
        return [state[name] for name in (*_ARRAYS[self._rule.name], *_COUNTS[self._rule.name])]

    def clear_gradients(self) -> None:
        """Let go of all gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def squared_norm(self) -> float:
        """Return the squared Euclidean norm of this rank's gradients as they are now."""
        return squared_norm(self._gradients())

    def update(self, step: int, squared_norm: float | None) -> None:
        """Update the parameters from their gradients, which are scaled first if the scenario clips them.

        Args:
            step: Counts from 0; the learning rate follows from it alone.
            squared_norm: Of the gradients of all layers of the model; needed only for clipping.
        """
        if self._clip_norm is not None:
            assert squared_norm is not None, "clipping needs the norm over all stages"
            self._scale_gradients(min(self._clip_norm / (math.sqrt(squared_norm) + _SMALLEST_NORM), 1.0))
        for group in self._optimizer.param_groups:
            group["lr"] = self._rule.learning_rate * self._rule.schedule.factor(step)
        self._optimizer.step()

    def _scale_gradients(self, factor: float) -> None:
        # A norm that is no number makes every gradient none, as in torch.
        if factor != 1:
            for gradient in self._gradients():
                gradient.mul_(factor)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def _make_optimizer(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    # torch refuses an empty list; a rank of layers without parameters still takes steps.
    parameters = parameters or [nn.Parameter(torch.zeros(0))]
    if optimizer.name == "adamw":
        return torch.optim.AdamW(parameters, lr=optimizer.learning_rate, weight_decay=optimizer.weight_decay)
    momentum = optimizer.momentum if optimizer.name == "momentum" else 0.0
    return torch.optim.SGD(
        parameters, lr=optimizer.learning_rate, momentum=momentum, weight_decay=optimizer.weight_decay
    )
