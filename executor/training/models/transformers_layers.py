"""Layers that wrap modules of transformers, so that each takes one tensor and returns one.

Shapes: B samples, T tokens, W width, V vocabulary. Each block computes its own mask and rotary position embeddings,
since a pipeline passes only the hidden values from layer to layer.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from executor.training.models.trainable import COLUMN, ROW, SUMMED, VOCABULARY

# Linear submodules that a tensor-parallel group shards along their outputs and along their inputs, by the last part of
# their names.
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query", "key", "value", "c_fc", "fc1")
_ROWS = ("o_proj", "down_proj", "c_proj", "fc2")
# Norms of each head, whose weights all devices of a group use.
_HEAD_NORMS = ("q_norm", "k_norm")


class Layer(nn.Module):
    """A part of a model of transformers.

    Attributes:
        origins: The submodules and parameters of this layer, each with its name in the model of transformers.
        layout: How a tensor-parallel group shards the submodules; see `TensorParallelModel.parallel_layout`.
    """

    def __init__(self, origins: Mapping[str, str]) -> None:
        super().__init__()
        self.origins = origins
        self.layout: Mapping[str, str] = MappingProxyType({})

    def original(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this layer's parameters, given by their names in the layer, by their names in transformers."""
        return {self.original_name(name): value for name, value in parameters.items()}

    def original_name(self, name: str) -> str:
        """Return the name in transformers of a parameter or a submodule of this layer."""
        first, _, rest = name.partition(".")
        return f"{self.origins[first]}.{rest}" if rest else self.origins[first]


class TokenEmbedding(Layer):
    """The table of tokens."""

    def __init__(self, embed_tokens: nn.Embedding, origin: str) -> None:
        super().__init__({"embed_tokens": origin})
        self.embed_tokens = embed_tokens
        self.layout = MappingProxyType({"embed_tokens": VOCABULARY})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token numbers, B x T, to embeddings, B x T x W."""
        embedded: torch.Tensor = self.embed_tokens(tokens)
        return embedded


class DecoderBlock(Layer):
    """A decoder block with causal attention, rotary position embeddings if it takes them, and an MLP.

    Args:
        block: The block of transformers.
        config: The configuration of the model of transformers.
        origin: Name of the block in the model of transformers.
        rotary: The module that computes rotary position embeddings; None for none.
        has_window: Whether attention covers ``config.sliding_window`` tokens only.
    """

    def __init__(
        self, block: nn.Module, config: Any, origin: str, rotary: nn.Module | None = None, *, has_window: bool = False
    ) -> None:
        super().__init__({"block": origin})
        self.block = block
        self.rotary = rotary
        self._config = config
        self._make_mask = create_sliding_window_causal_mask if has_window else create_causal_mask
        self.layout = block_layout(self)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden values, B x T x W, to values of the same shape."""
        # No mask results where attention of torch is causal by itself.
        mask = self._make_mask(self._config, hidden, None, None)
        settings: dict[str, Any] = {"attention_mask": mask}
        if self.rotary is not None:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
            settings |= {"position_embeddings": self.rotary(hidden, positions), "position_ids": positions}
        outputs: torch.Tensor = self.block(hidden, **settings)
        return outputs


class LanguageHead(Layer):
    """The last norm, and the matrix that gives the scores of the next token."""

    def __init__(self, norm: nn.Module, lm_head: nn.Linear, norm_origin: str) -> None:
        super().__init__({"norm": norm_origin, "lm_head": "lm_head"})
        self.norm = norm
        self.lm_head = lm_head
        self.layout = MappingProxyType({"lm_head": VOCABULARY})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden values, B x T x W, to scores, B x T x V; a shard to those of its rows."""
        scores: torch.Tensor = self.lm_head(self.norm(hidden))
        return scores


def block_layout(layer: nn.Module) -> Mapping[str, str]:
    """Return the layout of a block: query, key, value and the MLP's first matrices by outputs, the others by inputs."""
    found = {}
    for name, module in layer.named_modules():
        own = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and own in (*_COLUMNS, *_ROWS):
            found[name] = COLUMN if own in _COLUMNS else ROW
        elif own in _HEAD_NORMS:
            found[name] = SUMMED
    return MappingProxyType(found)
