"""A small GPT that learns a Markov chain.

Shapes: B samples, T tokens of a sequence, W width, H heads, D width of a head, V vocabulary. With tensor parallelism
each device has some of a block's heads.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

# Number of tokens that can follow a token, the first ones more likely than the others.
SUCCESSORS = 4
# Separate random streams for the chain itself and for the sequences drawn from it.
CHAIN_KEY, SEQUENCE_KEY = 1, 2


class Embedding(nn.Module):
    """Token and position embeddings, summed."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers, B x T, to embeddings, B x T x W."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.position(positions)
        return embedded


class Block(nn.Module):
    """Transformer block: causal attention and an MLP of four times the width, each with a layer norm and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden values, B x T x W, to values of the same shape."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        hidden = hidden + self.mlp(hidden)
        return hidden

    def _attend(self, hidden: Tensor) -> Tensor:
        samples, tokens, _ = hidden.shape
        # B x T x 3W becomes three of B x H x T x D; outputs are grouped by head, so that a slice has whole heads.
        joint = self.query_key_value(hidden).view(samples, tokens, -1, 3, self.head_width)
        query, key, value = joint.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.projection(mixed.transpose(1, 2).reshape(samples, tokens, -1))
        return attended


class Gpt:
    """The layers, the loss and the data of the language model.

    Attributes:
        layers: Embedding, blocks, and a head that maps B x T x W to scores of the next token, B x T x V.
    """

    def __init__(self, vocabulary: int, width: int, heads: int, blocks: int, length: int) -> None:
        self.layers: list[nn.Module] = [
            Embedding(vocabulary, length, width),
            *(Block(width, heads) for _ in range(blocks)),
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary)),
        ]
        self._length = length
        self._successors = _markov_chain(vocabulary)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next token."""
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def parallel_layout(self, index: int) -> Mapping[str, str]:
        """Return how tensor parallelism divides layer ``index``: ``column`` or ``row`` for each submodule's name.

        A block's attention is divided by heads, its MLP by width; other layers are not divided.
        """
        if not isinstance(self.layers[index], Block):
            return {}
        return {"query_key_value": "column", "projection": "row", "mlp.1": "column", "mlp.3": "row"}

    def samples(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return token numbers and, as targets, the next tokens, both int64, B x T, for B = ``count`` samples."""
        random = _random_rows(SEQUENCE_KEY, first, count, self._length + 1)
        choices = (random**2 * SUCCESSORS).astype(np.int64)
        tokens = np.empty(random.shape, dtype=np.int64)
        tokens[:, 0] = random[:, 0] * len(self._successors)
        for position in range(1, self._length + 1):
            tokens[:, position] = self._successors[tokens[:, position - 1], choices[:, position]]
        sequences = torch.from_numpy(tokens)
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def build(*, vocabulary: int = 256, width: int = 128, heads: int = 4, blocks: int = 8, length: int = 64) -> Gpt:
    """Return the model; its initial parameters follow `torch.manual_seed`.

    Args:
        vocabulary: Number of different tokens.
        width: Numbers per token between layers, a multiple of ``heads``.
        heads: Number of attention heads.
        blocks: Number of transformer blocks; the model's further layers are the embedding and the head.
        length: Tokens in a sequence.
    """
    if width % heads:
        raise ValueError(f"width ({width}) must be a multiple of heads ({heads})")
    return Gpt(vocabulary, width, heads, blocks, length)


def _markov_chain(vocabulary: int) -> NDArray[np.int64]:
    """Return the tokens that may follow each token, vocabulary x SUCCESSORS."""
    # Cubes of uniform numbers tend to 0: low tokens are common, which a model learns within a few steps.
    return (_random_rows(CHAIN_KEY, 0, vocabulary, SUCCESSORS) ** 3 * vocabulary).astype(np.int64)


def _random_rows(key: int, first: int, count: int, width: int) -> NDArray[np.float64]:
    """Return rows ``first`` to ``first + count - 1`` of an endless table of numbers in [0, 1).

    NumPy's generator Philox computes its n-th output from n, so that every row takes equally long. It counts in blocks
    of four outputs; each row of ``width`` numbers starts a block.
    """
    row_blocks = -(-width // 4)
    raw = np.random.Philox(key=key, counter=first * row_blocks).random_raw(count * row_blocks * 4)
    rows: NDArray[np.float64] = (raw >> np.uint64(11)) * np.float64(2**-53)
    return rows.reshape(count, row_blocks * 4)[:, :width]
