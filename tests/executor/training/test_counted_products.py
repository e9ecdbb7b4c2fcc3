"""Products and kernels as torch computes them, and as they are counted from a config.json."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.profiling.counted_work import counted
from executor.training.models.loading import load_model
from planner.files.importers.huggingface import read_huggingface
from planner.scenario.kind_table import MatrixProduct
from planner.scenario.scenario import HuggingFaceCode
from tests.helpers.scenarios import huggingface

SAMPLES, TOKENS = 3, 12
CONFIGS = {
    "llama": huggingface.LLAMA,
    "mistral": {**huggingface.MISTRAL, "sliding_window": 32},
    "qwen2": huggingface.QWEN2,
    "qwen3": huggingface.QWEN3,
    "gpt2": huggingface.GPT2,
    "vit": huggingface.VIT,
}


def columns(products: Sequence[MatrixProduct], samples: int) -> Counter[tuple[int, int]]:
    """The columns of all products with the same first matrix, which can be computed as one or as several."""
    found: Counter[tuple[int, int]] = Counter()
    for each in products:
        found[round(samples * each.rows), round(each.inner)] += round(each.outer) * each.count
    return found


@pytest.mark.parametrize("family", CONFIGS)
def test_those_of_a_config_are_those_of_torch(family: str, tmp_path: Path) -> None:
    config: Mapping[str, Any] = CONFIGS[family]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    tokens = 10 if family == "vit" else TOKENS
    model = load_model(HuggingFaceCode(path, config, tokens, None), 0)
    works = read_huggingface(path).layers(tokens)
    outputs = model.samples(0, SAMPLES)[0]
    for work, layer in zip(works, model.layers, strict=True):
        with torch.no_grad():
            outputs, computed = counted(partial(layer, outputs))
        of_loss = 2 if work.name == "head" else 0
        assert (work.name, columns(work.products, SAMPLES)) == (work.name, columns(computed.products, 1))
        assert (work.name, work.kernels) == (work.name, computed.kernels + of_loss)
        assert SAMPLES * work.forward_flop == pytest.approx(computed.flop)


INPUTS = torch.ones(2, 12, 32)
IMAGES = torch.ones(2, 4, 5, 6)
MODULES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, int, list[tuple[int, int, int, int]]]] = {
    "linear": (lambda: nn.Linear(32, 48), INPUTS, 1, [(24, 32, 48, 1)]),
    "without bias": (lambda: nn.Linear(32, 48, bias=False), INPUTS, 1, [(24, 32, 48, 1)]),
    "two": (lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), INPUTS, 3, [(24, 32, 32, 2)]),
    "norm": (lambda: nn.LayerNorm(32), INPUTS, 1, []),
    "convolution": (lambda: nn.Conv2d(4, 8, 3, padding=1), IMAGES, 1, [(60, 36, 8, 1)]),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), IMAGES, 1, [(24, 18, 4, 2)]),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), IMAGES, 1, [(60, 2, 27, 2)]),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_those_of_a_module(name: str, device: str) -> None:
    build, inputs, kernels, shapes = MODULES[name]
    module = build().to(device)
    with torch.no_grad():
        result, work = counted(lambda: module(inputs.to(device)))
    assert result.device.type == device
    assert work.products == tuple(MatrixProduct(*shape) for shape in shapes)
    assert work.flop == sum(each.flop for each in work.products)
    # One more copies the inputs to the device.
    assert work.kernels == kernels + (device == "meta")


def test_attention_is_two_products_for_all_heads() -> None:
    def attention(device: str) -> tuple[torch.Tensor, Any]:
        queries = torch.ones(2, 4, 12, 8, device=device)
        with torch.no_grad():
            return counted(lambda: functional.scaled_dot_product_attention(queries, queries, queries, is_causal=True))

    fused, small = attention("cpu")[1], attention("meta")[1]
    assert fused.products == small.products == (MatrixProduct(96, 8, 12), MatrixProduct(96, 12, 8))
    assert fused.flop == small.flop == 2 * 2 * 96 * 8 * 12
    assert fused.kernels == 1 < small.kernels
