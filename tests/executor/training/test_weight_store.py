"""A backward in two parts leaves the gradients of a whole one."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from executor.training.split_backward import WeightStore
from executor.training.stage_module import StageModule

CPU = torch.device("cpu")
MICROBATCHES = 2


class Twice(nn.Module):
    """Uses a module two times, and its weight once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(input=self.inner(hidden).tanh()) + functional.linear(hidden, self.inner.weight)


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.up.weight = self.down.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(torch.sin(self.down(hidden)))


class Energy(nn.Module):
    """Asks autograd for a gradient in the middle of its forward, to be differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.potential = nn.Linear(6, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = hidden if hidden.requires_grad else hidden.clone().requires_grad_()
        with torch.enable_grad():
            energy = self.potential(inner).square().sum()
            (force,) = torch.autograd.grad(energy, inner, create_graph=True)
        return hidden - 0.1 * force


class Checkpointed(nn.Module):
    """Recomputes a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.inner, hidden, use_reentrant=False)


class Own(nn.Linear):
    """A linear layer that does something else."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def frozen(module: nn.Linear, name: str) -> nn.Linear:
    getattr(module, name).requires_grad_(False)
    return module


def pruned(module: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(module, "weight", 0.5)
    return module


def hooked(module: nn.Linear) -> nn.Linear:
    module.register_forward_hook(lambda module, inputs, outputs: outputs * 3)
    return module


def weight_hooked(module: nn.Linear) -> nn.Linear:
    module.weight.register_hook(lambda gradient: gradient * 3)
    return module


# Layers, and whether some weight gradient is left for W.
LINEAR: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "linear": (lambda: nn.Linear(6, 6), True),
    "no bias": (lambda: nn.Linear(6, 6, bias=False), True),
    "in place behind it": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)), True),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), True),
    "used twice": (Twice, True),
    "tied": (Tied, True),
    "gradient in forward": (Energy, True),
    "checkpointed": (Checkpointed, True),
    "weight frozen": (lambda: nn.Sequential(nn.Linear(6, 6), frozen(nn.Linear(6, 6), "weight")), True),
    "bias frozen": (lambda: frozen(nn.Linear(6, 6), "bias"), True),
    "parametrised": (lambda: parametrizations.weight_norm(nn.Linear(6, 6)), False),
    "pruned": (lambda: pruned(nn.Linear(6, 6)), False),
    "hooked": (lambda: hooked(nn.Linear(6, 6)), False),
    "hook on the weight": (lambda: weight_hooked(nn.Linear(6, 6)), False),
    "subclass": (lambda: Own(6, 6), False),
}
CONVOLUTION: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "convolution": (lambda: nn.Conv2d(4, 8, 3), True),
    "no bias, padded": (lambda: nn.Conv2d(4, 8, 3, padding=1, bias=False), True),
    "strided, dilated, grouped": (lambda: nn.Conv2d(4, 8, (3, 2), (2, 1), (1, 2), dilation=2, groups=2), True),
    "in place behind it": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)), True),
    "same": (lambda: nn.Conv2d(4, 8, 3, padding="same"), False),
    "reflected": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), False),
    "of one image": (lambda: nn.Sequential(nn.Flatten(0, 1), nn.Conv2d(4, 4, 3)), True),
}
SHAPES = {"rows": (3, 6), "tokens": (2, 5, 6), "images": (2, 4, 7, 6), "one": (1, 4, 7, 6)}
CASES = [
    *((f"{name} of {shape}", *LINEAR[name], SHAPES[shape]) for name in LINEAR for shape in ("rows", "tokens")),
    *((name, *CONVOLUTION[name], SHAPES["one" if "one" in name else "images"]) for name in CONVOLUTION),
]


def stage_of(layer: nn.Module, precision: str, *, recompute: bool, splits: bool) -> StageModule:
    stage = StageModule([layer], CPU, precision, copies_inputs=False)
    stage.start_step(recompute=recompute, splits=splits)
    return stage


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("make", "puts_off", "shape"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_both_parts_make_a_whole(
    make: Callable[[], nn.Module], puts_off: bool, shape: tuple[int, ...], recompute: bool, precision: str
) -> None:
    torch.manual_seed(0)
    whole_layer = make()
    torch.manual_seed(0)
    split_layer = make()
    whole = stage_of(whole_layer, precision, recompute=recompute, splits=False)
    split = stage_of(split_layer, precision, recompute=recompute, splits=True)
    batches = [torch.randn(shape) for _ in range(MICROBATCHES)]
    expected, found, upstream = [], [], []
    for number, batch in enumerate(batches):
        outputs = whole.forward(number, batch.clone().requires_grad_())
        assert torch.equal(split.forward(number, batch.clone().requires_grad_()), outputs)
        upstream.append(torch.randn_like(outputs))
    for number, gradient in enumerate(upstream):
        expected.append(whole.backward(number, gradient))
        found.append(split.backward_input(number, gradient))
    now, later = gradients(split_layer), gradients(whole_layer)
    assert puts_off != all(name in now and torch.allclose(now[name], later[name]) for name in later)
    for number in reversed(range(MICROBATCHES)):
        split.backward_weight(number)
    # Autocast casts a tensor once for all of its uses, and so sums their gradients in bfloat16.
    exact, close = (0.0, 1e-6) if precision == "fp32" else (0.02, 0.02)
    torch.testing.assert_close(found, expected, rtol=exact, atol=exact)
    torch.testing.assert_close(gradients(split_layer), gradients(whole_layer), rtol=close, atol=close)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(["F", "I", "W", "B"]), max_size=60), st.integers(1, 5), st.booleans(), st.integers(0, 9)
)
def test_any_order_of_microbatches(wanted: list[str], microbatches: int, recompute: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = copy.deepcopy(layer)
    data = torch.randn(microbatches, 2, 3)
    expected(data.flatten(0, 1)).square().sum().backward()
    stage = stage_of(layer, "fp32", recompute=recompute, splits=True)
    fresh, forwarded, halfway = list(range(microbatches)), [], []
    # Whatever hypothesis leaves undone is done at the end.
    for kind in [*wanted, *"F" * microbatches, *"B" * microbatches, *"W" * microbatches]:
        if kind == "F" and fresh:
            microbatch = fresh.pop(seed % len(fresh))
            stage.forward(microbatch, data[microbatch], lambda outputs: outputs.square().sum())
            forwarded.append(microbatch)
        elif kind in "BI" and forwarded:
            microbatch = forwarded.pop(seed % len(forwarded))
            backward = stage.backward if kind == "B" else stage.backward_input
            assert backward(microbatch, None) is None
            halfway += [microbatch] if kind == "I" else []
        elif kind == "W" and halfway:
            stage.backward_weight(halfway.pop(seed % len(halfway)))
    torch.testing.assert_close(gradients(layer), gradients(expected), rtol=1e-5, atol=1e-6)


def test_other_modules_of_the_class_are_left_alone_and_so_are_these_afterwards() -> None:
    layer, original = nn.Sequential(nn.Linear(2, 2)), nn.Linear.forward
    store = WeightStore()
    store.install(layer.modules())
    assert nn.Linear.forward is original
    assert "forward" not in vars(nn.Linear(2, 2))
    assert "forward" in vars(layer[0])
    store.install(layer.modules())
    store.remove()
    assert vars(layer[0]).keys() == vars(nn.Linear(2, 2)).keys()


class Conversions(TorchDispatchMode):
    """Counts the conversions of tensors of a shape to another type."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += args[0].dtype == torch.float32
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 8, 3), nn.Linear(6, 7)], ids=["convolution", "linear"])
def test_all_microbatches_of_a_step_use_one_converted_weight(layer: nn.Conv2d | nn.Linear) -> None:
    stage = stage_of(layer, "bf16", recompute=False, splits=True)
    batches = [torch.randn(2, 4, 7, 6, requires_grad=True) for _ in range(3)]
    with Conversions(layer.weight.shape) as conversions:
        outputs = [stage.forward(number, batch) for number, batch in enumerate(batches)]
        for number, each in enumerate(outputs):
            stage.backward_input(number, torch.ones_like(each))
        for number in range(len(batches)):
            stage.backward_weight(number)
    assert conversions.count == 1


class Watched(nn.Module):
    """Remembers, without keeping them, the tensors that went through it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = hidden.exp()
        self.seen.append(weakref.ref(outputs))
        return outputs


@pytest.mark.parametrize("splits", [False, True])
def test_only_what_is_still_needed_is_held(splits: bool) -> None:
    watched = Watched()
    stage = StageModule([nn.Linear(3, 3), watched, nn.Linear(3, 3), nn.Dropout(0)], CPU, "fp32", copies_inputs=False)
    stage.start_step(recompute=True, splits=splits)
    stage.forward(0, torch.ones(2, 3))
    assert [each() for each in watched.seen] == [None], "recomputed later, so not kept"
    stage.start_step(recompute=False, splits=splits)
    outputs = weakref.ref(stage.forward(0, torch.ones(2, 3)))
    assert watched.seen[-1]() is not None
    assert outputs() is None
    stage.backward_input(0, torch.ones(2, 3)) if splits else stage.backward(0, torch.ones(2, 3))
    assert watched.seen[-1]() is None
