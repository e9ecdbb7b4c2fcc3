"""Splits a backward in two passes, and reports when the gradients of each bucket of layers are complete.

The input pass computes the gradient of a stage's inputs, and defers weight gradients; the weight pass computes these.
Only weight gradients of linear layers and convolutions are deferred, since these take most of the time. All other
parameters, such as those of norms and embeddings, and biases, get their gradients in the input pass. The results equal
those of an unsplit backward, except that the terms of a weight that is used several times are added in another order.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class GradBucketHooks:
    """Reports, during the last backward of a step, when the gradients of each bucket of layers are complete.

    Args:
        buckets: The parameters of each bucket, by its number.
        complete: Called once with the number of each bucket when its gradients are complete.
    """

    def __init__(self, buckets: Mapping[int, Iterable[nn.Parameter]], complete: Callable[[int], None]) -> None:
        self._bucket = {parameter: number for number, own in buckets.items() for parameter in own}
        self._open = set(buckets)
        self._missing: Counter[int] = Counter()
        self._complete = complete

    @contextmanager
    def autograd(self) -> Iterator[None]:
        """Return a context for a backward by autograd, which computes the gradients of all trained parameters."""
        trained = [parameter for parameter in self._bucket if parameter.requires_grad]
        self.expect(trained)
        hooks = [each.register_post_accumulate_grad_hook(self.added) for each in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Expect one addition to the gradient of a parameter for each time that it is listed."""
        self._missing.update(self._bucket[parameter] for parameter in parameters if parameter in self._bucket)

    def added(self, parameter: nn.Parameter) -> None:
        """Count an addition to the gradient of a parameter."""
        number = self._bucket.get(parameter)
        if number is not None:
            self._missing[number] -= 1
            if not self._missing[number]:
                self._close(number)

    def close(self) -> None:
        """Report all remaining buckets as complete, after backward: their parameters took no part in it."""
        for number in sorted(self._open):
            self._close(number)

    def _close(self, number: int) -> None:
        if number in self._open:
            self._open.remove(number)
            self._complete(number)


class _Linear:
    """A linear layer in two dimensions: its forward, and each gradient from ``gradient``, that of the outputs.

    Shapes: inputs (samples, in_features), outputs (samples, out_features), weight (out_features, in_features). The
    arguments of the methods have the dtype of the computation, which may differ from that of the module's parameters
    ``weight`` and ``bias``.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight = weight
        self.bias = bias

    def run(self, inputs: torch.Tensor, apply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        # `apply` calls `forward`. The outputs of `forward` must not be a view, which could not be changed in place; of
        # inputs with more dimensions torch.nn.functional.linear would return a view.
        return apply(inputs.reshape(-1, inputs.shape[-1])).view(*inputs.shape[:-1], -1)

    def forward(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(inputs, weight, bias)

    def input_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gradient @ weight

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sum(0)

    def weight_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gradient.t() @ inputs


class _Convolution:
    """A two-dimensional convolution, with the methods of `_Linear`; tensors have the shapes of `torch.nn.Conv2d`."""

    def __init__(self, module: nn.Conv2d, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        assert not isinstance(module.padding, str)
        self.weight, self.bias = weight, bias
        self._stride, self._padding, self._dilation = module.stride, module.padding, module.dilation
        self._groups = module.groups

    def run(self, inputs: torch.Tensor, apply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        # torch.nn.Conv2d also accepts a single image without a batch dimension.
        return apply(inputs) if inputs.ndim == 4 else apply(inputs.unsqueeze(0)).squeeze(0)

    def forward(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.conv2d(inputs, weight, bias, self._stride, self._padding, self._dilation, self._groups)

    def input_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._gradients(gradient, inputs, weight, [True, False, False])[0]

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sum((0, 2, 3))

    def weight_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._gradients(gradient, inputs, weight, [False, True, False])[1]

    def _gradients(
        self, gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        geometry = (self._stride, self._padding, self._dilation)
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.convolution_backward(
            gradient, inputs, weight, None, *geometry, False, (0, 0), self._groups, wanted
        )
        return gradients


# A module whose backward can be split.
Splittable = _Linear | _Convolution


def splittable(module: nn.Module) -> Splittable | None:
    """Return an object that computes a module's input gradient and weight gradients separately.

    Only unmodified linear layers and convolutions have one; the result is None for all other modules.
    """
    if type(module) not in (nn.Linear, nn.Conv2d) or is_modified(module):
        return None
    # Parametrizations and pruning replace the parameter by a tensor that is computed from other parameters.
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if type(weight) is not nn.Parameter or _has_hooks(weight) or not (bias is None or type(bias) is nn.Parameter):
        return None
    if isinstance(module, nn.Conv2d):
        # Other padding modes pad before the convolution, and padding="same" may be asymmetric.
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return _Convolution(module, weight, bias) if plain else None
    return _Linear(weight, bias)


def is_modified(module: nn.Module) -> bool:
    """Return whether a module has hooks, or a forward of its own."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return "forward" in vars(module) or any(getattr(module, name) for name in hooks)


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


# A module whose weight gradient is deferred, the gradient of its outputs, and its inputs.
_Deferred = tuple[Splittable, torch.Tensor, torch.Tensor]


class WeightStore:
    """Defers the weight gradients of modules: stores their inputs by microbatch until the weight pass."""

    def __init__(self) -> None:
        self._deferred: dict[int, list[_Deferred]] = {}
        self._current: list[_Deferred] | None = None
        self._installed: list[nn.Module] = []
        self._converted: dict[Splittable, torch.Tensor] = {}

    def install(self, modules: Iterable[nn.Module]) -> None:
        """Replace the ``forward`` of each linear layer and convolution by one whose backward can be split."""
        if self._installed:
            return
        for module in modules:
            parts = splittable(module)
            if parts is not None:
                vars(module)["forward"] = partial(_forward, self, parts, module.forward)
                self._installed.append(module)

    def remove(self) -> None:
        """Undo `install`."""
        for module in self._installed:
            del vars(module)["forward"]
        self._installed = []

    def deferring(self, microbatch: int) -> AbstractContextManager[None]:
        """Return a context in which backward defers the weight gradients of a microbatch."""
        return self._collecting(self._deferred.setdefault(microbatch, []))

    def paused(self) -> AbstractContextManager[None]:
        """Return a context for a forward, which may run inside a backward and may itself compute gradients."""
        return self._collecting(None)

    @contextmanager
    def _collecting(self, deferred: list[_Deferred] | None) -> Iterator[None]:
        before, self._current = self._current, deferred
        try:
            yield
        finally:
            self._current = before

    def compute(self, microbatch: int, buckets: GradBucketHooks | None = None) -> None:
        """Compute the deferred weight gradients of a microbatch, and add them to ``weight.grad`` of each module.

        The inputs that each gradient is computed from are dropped at once, to free their memory.
        """
        # Reversed, so that `pop` returns the entries in the order in which they were deferred.
        waiting = self._deferred.pop(microbatch)[::-1]
        if buckets is not None:
            buckets.expect(parts.weight for parts, _, _ in waiting)
        with torch.no_grad():
            while waiting:
                weight = self._add_gradient(*waiting.pop())
                if buckets is not None:
                    buckets.added(weight)

    def _add_gradient(self, parts: Splittable, gradient: torch.Tensor, inputs: torch.Tensor) -> nn.Parameter:
        """Add one weight gradient to ``weight.grad``, and return the weight.

        A function of its own, because its end frees all of its tensors before the next gradient is computed.
        """
        weight, converted = parts.weight, self.converted(parts, inputs.dtype)
        found = parts.weight_gradient(gradient, inputs, converted).to(weight.dtype)
        weight.grad = found if weight.grad is None else weight.grad.add_(found)
        return weight

    def deferred_bytes(self, microbatch: int) -> int:
        """Return the bytes of the tensors that are stored for the weight pass of a microbatch."""
        deferred = self._deferred.get(microbatch, [])
        storages = (each.untyped_storage() for _, *tensors in deferred for each in tensors)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def converted(self, parts: Splittable, dtype: torch.dtype) -> torch.Tensor:
        """Return a module's weight in the type of the computation; a copy is kept until `clear`.

        Not by autocast, which would give the copy to other modules too although it has no graph. A backward that itself
        is differentiated needs a copy with a graph, which is not kept.
        """
        if parts.weight.dtype == dtype or torch.is_grad_enabled():
            return parts.weight.to(dtype)
        if parts not in self._converted:
            self._converted[parts] = parts.weight.detach().to(dtype)
        return self._converted[parts]

    def clear(self) -> None:
        """Drop everything that was deferred, and the converted weights, which the optimizer may have changed."""
        self._deferred = {}
        self._converted = {}

    def defer(self, parts: Splittable, gradient: torch.Tensor, inputs: torch.Tensor) -> bool:
        """Inside `deferring`, store what a weight gradient is computed from; return whether it is stored."""
        if self._current is None:
            return False
        # Detach the tensors, which would otherwise keep autograd's graph in memory.
        self._current.append((parts, gradient.detach(), inputs.detach()))
        return True


class _Split(torch.autograd.Function):
    """The autograd function of a splittable module; its backward computes the weight gradient, or defers it."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        parts: Splittable,
        store: WeightStore,
    ) -> torch.Tensor:
        # The weight too, so that torch notices if it is changed before the backward.
        ctx.save_for_backward(inputs, weight)
        ctx.parts, ctx.store = parts, store
        dtype = inputs.dtype
        return parts.forward(inputs, store.converted(parts, dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        inputs, _ = ctx.saved_tensors
        parts: Splittable = ctx.parts
        store: WeightStore = ctx.store
        of_inputs, of_weight, of_bias, *_ = ctx.needs_input_grad
        weight = store.converted(parts, inputs.dtype)
        found = parts.input_gradient(gradient, inputs, weight) if of_inputs else None
        later = not of_weight or store.defer(parts, gradient, inputs)
        now = None if later else parts.weight_gradient(gradient, inputs, weight).to(parts.weight.dtype)
        return found, now, parts.bias_gradient(gradient).to(parts.weight.dtype) if of_bias else None, None, None


def _forward(
    store: WeightStore, parts: Splittable, original: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor
) -> torch.Tensor:
    """Run a module's forward so that its backward can be split; `WeightStore.install` makes this its ``forward``."""
    if not torch.is_grad_enabled() or not parts.weight.requires_grad:
        return original(input)
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    return parts.run(input, lambda flat: _apply(flat, parts.weight, parts.bias, parts, store))


def _apply(*arguments: object) -> torch.Tensor:
    outputs: torch.Tensor = _Split.apply(*arguments)  # type: ignore[no-untyped-call]
    return outputs
