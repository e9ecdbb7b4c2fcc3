"""Counts the operations, matrix products and kernels of a layer's forward, which may be on torch's meta device."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from planner.scenario.kind_table import MatrixProduct

# Operations without a kernel, beside views: their result is a view too, or only memory.
_WITHOUT_KERNEL = ("_reshape_alias", "_unsafe_view", "arange", "empty", "empty_like")


@dataclass(frozen=True, slots=True)
class CountedWork:
    """What was counted in the forward of one sample or more.

    Attributes:
        flop: Floating-point operations of products, as torch counts them.
        products: Matrix products, with the rows of all samples.
        kernels: Number of kernels. Attention is one where torch has it fused, which is not on the meta device.
    """

    flop: float
    products: tuple[MatrixProduct, ...]
    kernels: int


def counted(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, CountedWork]:
    """Return the result of ``forward``, and what it has computed."""
    flop, shapes = FlopCounterMode(display=False), _Shapes()
    with flop, shapes:
        result = forward()
    products = tuple(MatrixProduct(*shape, count) for shape, count in shapes.products.items() if all(shape))
    # Torch does not count the operations of its fused attention on CPUs.
    most_flop = max(float(flop.get_total_flops()), sum(each.flop for each in products))
    return result, CountedWork(most_flop, products, shapes.kernels)


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels, and products by rows, inner and outer size."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = 0
        self.products: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.kernels += not (func.is_view or name in _WITHOUT_KERNEL)
        shapes = _PRODUCTS.get("attention" if name.startswith("_scaled_dot_product") else name)
        if shapes is not None:
            for rows, inner, outer, count in shapes(args, result):
                self.products[rows, inner, outer] += count
        return result


def _matrices(left: torch.Tensor, right: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Return the product of two matrices, or of many as one with the rows of all."""
    return [(left[..., 0].numel(), left.shape[-1], right.shape[-1], 1)]


def _attention(queries: torch.Tensor, keys: torch.Tensor) -> list[tuple[int, int, int, int]]:
    rows, width, seen = queries[..., 0].numel(), queries.shape[-1], keys.shape[-2]
    return [(rows, width, seen, 1), (rows, seen, width, 1)]


def _convolution(args: Sequence[Any], result: torch.Tensor) -> list[tuple[int, int, int, int]]:
    inputs, weights, is_transposed, groups = args[0], args[1], args[6], args[8]
    if is_transposed:
        return [(inputs[:, 0].numel(), inputs.shape[1] // groups, prod(weights.shape[1:]), groups)]
    return [(result[:, 0].numel(), prod(weights.shape[1:]), weights.shape[0] // groups, groups)]


# By the operation's name: rows, inner, outer and number of its products, from its arguments and result.
_PRODUCTS: Mapping[str, Callable[[Sequence[Any], Any], list[tuple[int, int, int, int]]]] = MappingProxyType(
    {
        "mm": lambda args, _: _matrices(args[0], args[1]),
        "bmm": lambda args, _: _matrices(args[0], args[1]),
        "addmm": lambda args, _: _matrices(args[1], args[2]),
        "baddbmm": lambda args, _: _matrices(args[1], args[2]),
        "attention": lambda args, _: _attention(args[0], args[1]),
        "convolution": _convolution,
    }
)
