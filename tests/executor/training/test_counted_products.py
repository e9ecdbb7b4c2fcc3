"""The products and kernels that are counted from a config.json are those that torch computes."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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

# Operations that only give their input another shape.
VIEWS = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "permute",
    "split",
    "arange",
    "detach",
)


class Computed(TorchDispatchMode):
    """Counts the kernels, and the columns of products by their rows and inner size, of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.columns: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.kernels += name not in VIEWS
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            self.columns[left.shape[0], left.shape[1]] += right.shape[1]
        elif name == "convolution":
            inputs, weights = args[:2]
            outer, inner = weights.shape[0], weights[0].numel()
            self.columns[inputs.shape[0] * result[0, 0].numel(), inner] += outer
        elif name.startswith("_scaled_dot_product"):
            queries, keys = args[:2]
            rows, width, seen = queries[..., 0].numel(), queries.shape[-1], keys.shape[-2]
            self.columns[rows, width] += seen
            self.columns[rows, seen] += width
        return result


def columns(products: tuple[MatrixProduct, ...]) -> Counter[tuple[int, int]]:
    counted: Counter[tuple[int, int]] = Counter()
    for each in products:
        counted[round(SAMPLES * each.rows), round(each.inner)] += round(each.outer) * each.count
    return counted


@pytest.mark.parametrize("family", CONFIGS)
def test_counted_products_and_kernels_are_those_of_torch(family: str, tmp_path: Path) -> None:
    config: Mapping[str, Any] = CONFIGS[family]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    tokens = 10 if family == "vit" else TOKENS
    model = load_model(HuggingFaceCode(path, config, tokens, None), 0)
    works = read_huggingface(path).layers(tokens)
    outputs = model.samples(0, SAMPLES)[0]
    for work, layer in zip(works, model.layers, strict=True):
        with torch.no_grad(), Computed() as computed:
            outputs = layer(outputs)
        of_loss = 2 if work.name == "head" else 0
        assert (work.name, columns(work.products)) == (work.name, computed.columns)
        assert (work.name, work.kernels) == (work.name, computed.kernels + of_loss)
