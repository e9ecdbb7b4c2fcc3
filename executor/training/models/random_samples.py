"""Random samples for a model without data: the same for the same index, whatever the plan and the seed."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from executor.training.data.tokens import following

# Separate random streams.
_TOKENS_KEY, _PIXELS_KEY, _LABELS_KEY = 3, 4, 5


class RandomTokens:
    """Sequences of independent tokens; the targets are the following tokens, and `NO_TARGET` after the last one."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens

    def samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of samples ``first`` to ``first + count - 1``, both int64, count x tokens."""
        tokens = _below(_random_rows(_TOKENS_KEY, first, count, self._tokens), self._vocabulary)
        return tokens, following(tokens)


class RandomImages:
    """Images of independent pixels from 0 to 1, with independent labels."""

    def __init__(self, sizes: Sequence[int], labels: int) -> None:
        self._sizes = tuple(sizes)
        self._labels = labels

    def samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images, float32, count x channels x height x width, and their labels, int64, count."""
        pixels = _random_rows(_PIXELS_KEY, first, count, math.prod(self._sizes)) >> np.uint64(40)
        images = torch.from_numpy((pixels * np.float64(2**-24)).astype(np.float32)).view(count, *self._sizes)
        return images, _below(_random_rows(_LABELS_KEY, first, count, 1)[:, 0], self._labels)


def _below(numbers: NDArray[np.uint64], end: int) -> torch.Tensor:
    return torch.from_numpy((numbers % np.uint64(end)).astype(np.int64))


def _random_rows(key: int, first: int, count: int, width: int) -> NDArray[np.uint64]:
    """Return rows ``first`` to ``first + count - 1`` of an endless table of random numbers of 64 bits.

    Philox computes its n-th output from n. It counts in blocks of four outputs; each row starts a block.
    """
    row_blocks = -(-width // 4)
    raw = np.random.Philox(key=key, counter=first * row_blocks).random_raw(count * row_blocks * 4)
    rows: NDArray[np.uint64] = raw.reshape(count, row_blocks * 4)[:, :width]
    return rows
