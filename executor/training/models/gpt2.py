"""The layers of GPT-2, whose matrices become linear layers that a tensor-parallel group can shard."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from executor.training.models.trainable import VOCABULARY
from executor.training.models.transformers_layers import DecoderBlock, Layer

_JOINT = "attn.c_attn"
_MATRICES = ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_PARTS = ("query", "key", "value")


class PositionedEmbedding(Layer):
    """The tables of tokens and positions, whose rows are added."""

    def __init__(self, model: Any) -> None:
        super().__init__({"wte": "transformer.wte", "wpe": "transformer.wpe"})
        self.wte, self.wpe, self.drop = model.wte, model.wpe, model.drop
        self.layout = MappingProxyType({"wte": VOCABULARY})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token numbers, B x T, to embeddings, B x T x W."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        embedded: torch.Tensor = self.drop(self.wte(tokens) + self.wpe(positions))
        return embedded


class Gpt2Block(DecoderBlock):
    """A block of GPT-2 with a linear layer for each of query, key and value, and for each other matrix.

    GPT-2 stores its matrices as input x output, those of query, key and value beside each other; `original` returns
    them so.
    """

    def __init__(self, block: nn.Module, config: Any, origin: str) -> None:
        joint = block.get_submodule(_JOINT)
        assert isinstance(joint, Conv1D)
        parts = zip(joint.weight.chunk(3, dim=1), joint.bias.chunk(3), strict=True)
        block.set_submodule(_JOINT, _QueryKeyValue(*(_linear(*part) for part in parts)))
        for name in _MATRICES:
            matrix = block.get_submodule(name)
            assert isinstance(matrix, Conv1D)
            block.set_submodule(name, _linear(matrix.weight, matrix.bias))
        super().__init__(block, config, origin)

    def original(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this block's parameters, given by their names in the layer, by their names in transformers."""
        joint = f"block.{_JOINT}"
        split = {f"{joint}.{part}.{kind}" for part in _PARTS for kind in ("weight", "bias")}
        whole = {name: value for name, value in parameters.items() if name not in split}
        for name in _MATRICES:
            whole[f"block.{name}.weight"] = whole[f"block.{name}.weight"].t().contiguous()
        weights, biases = ([parameters[f"{joint}.{part}.{kind}"] for part in _PARTS] for kind in ("weight", "bias"))
        whole |= {f"{joint}.weight": torch.cat(weights).t().contiguous(), f"{joint}.bias": torch.cat(biases)}
        return super().original(whole)


class _QueryKeyValue(nn.Module):
    """Three linear layers in place of GPT-2's joint one, whose outputs its attention splits in three."""

    def __init__(self, query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
        super().__init__()
        self.query, self.key, self.value = query, key, value

    def forward(self, hidden: torch.Tensor) -> "_Parts":
        return _Parts((self.query(hidden), self.key(hidden), self.value(hidden)))


class _Parts(tuple[torch.Tensor, ...]):
    """Outputs that are split already; of a sharded layer they are narrower than what attention asks for."""

    __slots__ = ()

    def split(self, size: int, dim: int) -> "_Parts":
        return self


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    inputs, outputs = weight.shape
    made = nn.Linear(inputs, outputs, device="meta")
    made.weight = nn.Parameter(weight.detach().t().contiguous())
    made.bias = nn.Parameter(bias.detach().clone())
    return made
