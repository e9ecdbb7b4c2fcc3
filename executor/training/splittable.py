"""Modules whose weight gradient takes time, and the parts of their backward."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class Splittable(ABC):
    """A linear layer or a convolution: its forward, and each gradient by itself.

    Inputs, weight, bias and gradients that its methods get are of the dtype that is computed in.

    Attributes:
        module: It keeps the parameters; what recomputation hands back are copies of them.
    """

    def __init__(self, module: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.module = module
        self.weight = weight
        self.bias = bias

    def run(self, inputs: torch.Tensor, apply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what the module returns, where ``apply`` does `forward` on the inputs in the shape for it."""
        return apply(inputs)

    @abstractmethod
    def forward(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs; they must not be a view, or nobody could change them in place."""

    @abstractmethod
    def input_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the inputs from that of the outputs."""

    @abstractmethod
    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the bias from that of the outputs."""

    @abstractmethod
    def weight_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight from that of the outputs."""

    def add_weight_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the gradient of the weight to what the parameter has."""
        found = self.weight_gradient(gradient, inputs).to(self.weight.dtype)
        self.weight.grad = found if self.weight.grad is None else self.weight.grad.add_(found)


class _Linear(Splittable):
    """Shapes: inputs N x I, outputs N x O, weight O x I."""

    def run(self, inputs: torch.Tensor, apply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        # With more dimensions torch would return a view.
        return apply(inputs.reshape(-1, inputs.shape[-1])).view(*inputs.shape[:-1], -1)

    def forward(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(inputs, weight, bias)

    def input_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gradient @ weight

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sum(0)

    def weight_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return gradient.t() @ inputs


class _Convolution(Splittable):
    """Shapes: inputs B x I x H x W, outputs B x O x H' x W', weight O x I/groups x K x K'."""

    def __init__(self, module: nn.Conv2d, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__(module, weight, bias)
        assert not isinstance(module.padding, str)
        self._stride, self._padding, self._dilation = module.stride, module.padding, module.dilation
        self._groups = module.groups

    def run(self, inputs: torch.Tensor, apply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        # torch takes a single image too.
        return apply(inputs) if inputs.ndim == 4 else apply(inputs.unsqueeze(0)).squeeze(0)

    def forward(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.conv2d(inputs, weight, bias, self._stride, self._padding, self._dilation, self._groups)

    def input_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._gradients(gradient, inputs, weight, [True, False, False])[0]

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sum((0, 2, 3))

    def weight_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return self._gradients(gradient, inputs, self.weight.to(inputs.dtype), [False, True, False])[1]

    def _gradients(
        self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        steps = (self._stride, self._padding, self._dilation)
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, *steps, False, (0, 0), self._groups, wanted
        )
        return gradients


def splittable(module: nn.Module) -> Splittable | None:
    """Return the parts of a module's backward; None where it does more than its class, or something else."""
    if type(module) not in (nn.Linear, nn.Conv2d) or _is_extended(module):
        return None
    # Parametrisations and pruning replace the parameter by something that is computed from others.
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if type(weight) is not nn.Parameter or _has_hooks(weight) or not (bias is None or type(bias) is nn.Parameter):
        return None
    if isinstance(module, nn.Conv2d):
        # Other paddings are computed ahead of the convolution, or are not the same on both sides.
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return _Convolution(module, weight, bias) if plain else None
    return _Linear(module, weight, bias)


def _is_extended(module: nn.Module) -> bool:
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return "forward" in vars(module) or any(getattr(module, name) for name in hooks)


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
