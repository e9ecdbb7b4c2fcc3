"""The split of backward in two: I gives the input gradient and puts weight gradients off, W computes those.

Only where the weight gradient is where the time goes: see `executor.training.split_backward`. Everything else, as
norms, biases, embeddings and parameters that a layer uses directly, gets its gradient in I. The sums are those of an
unsplit backward; where a weight is used several times they are added in another order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from executor.training.grad_buckets import GradBucketHooks


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


# A module, the gradient of its outputs, and its inputs.
_PutOff = tuple[Splittable, torch.Tensor, torch.Tensor]


class WeightStore:
    """Weight gradients that are put off, by microbatch."""

    def __init__(self) -> None:
        self._put_off: dict[int, list[_PutOff]] = {}
        self._current: list[_PutOff] | None = None
        self._installed: list[nn.Module] = []

    def install(self, modules: Iterable[nn.Module]) -> None:
        """From their next forward on, let the backward of these modules be split; of the instances, not the classes."""
        if self._installed:
            return
        for module in modules:
            parts = splittable(module)
            if parts is not None:
                vars(module)["forward"] = partial(_forward, self, parts, module.forward)
                self._installed.append(module)

    def remove(self) -> None:
        """Let the modules do again what their class says."""
        for module in self._installed:
            del vars(module)["forward"]
        self._installed = []

    @contextmanager
    def putting_off(self, microbatch: int) -> Iterator[None]:
        """Around the backward of a microbatch of which only the input gradient is wanted now."""
        with self._taking(self._put_off.setdefault(microbatch, [])):
            yield

    def paused(self) -> AbstractContextManager[None]:
        """Around a forward, which may run inside a backward and may itself ask autograd for gradients."""
        return self._taking(None)

    @contextmanager
    def _taking(self, put_off: list[_PutOff] | None) -> Iterator[None]:
        before, self._current = self._current, put_off
        try:
            yield
        finally:
            self._current = before

    def compute(self, microbatch: int, watch: GradBucketHooks | None = None) -> None:
        """Add the weight gradients that were put off for a microbatch, and let go of what they are made from."""
        # Those of the last layers were put off first.
        waiting = self._put_off.pop(microbatch)[::-1]
        if watch is not None:
            watch.expect(parts.weight for parts, _, _ in waiting)
        with torch.no_grad():
            while waiting:
                parts, gradient, inputs = waiting.pop()
                parts.add_weight_gradient(gradient, inputs)
                if watch is not None:
                    watch.arrived(parts.weight)

    def clear(self) -> None:
        """Forget everything that was put off."""
        self._put_off = {}

    def put_off(self, parts: Splittable, gradient: torch.Tensor, inputs: torch.Tensor) -> bool:
        """Keep what a weight gradient is made from, if it is put off now; return whether it is."""
        if self._current is None:
            return False
        # Detached: inputs come out of the graph with all that they were made from.
        self._current.append((parts, gradient.detach(), inputs.detach()))
        return True


class _Split(torch.autograd.Function):
    """A splittable module in the graph; its weight gets its gradient here unless the store takes it."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        parts: Splittable,
        store: WeightStore,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.parts, ctx.store = parts, store
        # Cast here and not by autocast, which would remember the copies for uses outside, and they have no graph.
        dtype = inputs.dtype
        return parts.forward(inputs, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        parts: Splittable = ctx.parts
        store: WeightStore = ctx.store
        of_inputs, of_weight, of_bias, *_ = ctx.needs_input_grad
        found = parts.input_gradient(gradient, inputs, weight.to(inputs.dtype)) if of_inputs else None
        later = not of_weight or store.put_off(parts, gradient, inputs)
        now = None if later else parts.weight_gradient(gradient, inputs).to(weight.dtype)
        return found, now, parts.bias_gradient(gradient).to(weight.dtype) if of_bias else None, None, None


def _forward(
    store: WeightStore, parts: Splittable, original: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor
) -> torch.Tensor:
    """What a module does while its backward can be split; the name of ``input`` is torch's."""
    if not torch.is_grad_enabled() or not parts.weight.requires_grad:
        return original(input)
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    return parts.run(input, lambda flat: _apply(flat, parts.weight, parts.bias, parts, store))


def _apply(*arguments: object) -> torch.Tensor:
    outputs: torch.Tensor = _Split.apply(*arguments)  # type: ignore[no-untyped-call]
    return outputs
