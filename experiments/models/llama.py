"""A language model in the shape of Llama: RMS norm, rotary positions and a gated MLP. The scenario names its data.

Shapes: B samples, T tokens of a sequence, W width, H heads, D width of a head, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Transformer block: causal attention with rotary positions and a gated MLP, each with an RMS norm and a residual.

    Args:
        width: Numbers per token.
        heads: Number of attention heads.
        inner: Width of the MLP.
    """

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden values, B x T x W, to values of the same shape."""
        samples, tokens, width = hidden.shape
        joint = self.query_key_value(self.attention_norm(hidden)).view(samples, tokens, 3, self._heads, -1)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(samples, tokens, width))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        outputs: Tensor = hidden + self.down(functional.silu(gate) * up)
        return outputs


def _rotated(heads: Tensor) -> Tensor:
    """Rotate pairs of numbers of each head, B x H x T x D, by an angle that grows with the position."""
    half = heads.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=heads.device) / half)
    angles = torch.arange(heads.shape[-2], device=heads.device)[:, None] * rates
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Llama:
    """The layers and the loss of the language model.

    Attributes:
        layers: Embedding, blocks, and a head that maps B x T x W to scores of the next token, B x T x V.
    """

    def __init__(self, vocabulary: int, width: int, heads: int, inner: int, blocks: int) -> None:
        self.layers: list[nn.Module] = [
            nn.Embedding(vocabulary, width),
            *(Block(width, heads, inner) for _ in range(blocks)),
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)),
        ]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next token."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def build(*, vocabulary: int = 32_000, width: int = 512, heads: int = 8, inner: int = 1376, blocks: int = 8) -> Llama:
    """Return the model, by default with 58 million parameters; they follow `torch.manual_seed`.

    Args:
        vocabulary: Number of different tokens.
        width: Numbers per token between layers.
        heads: Number of attention heads.
        inner: Width of the MLP.
        blocks: Number of transformer blocks.
    """
    return Llama(vocabulary, width, heads, inner, blocks)
