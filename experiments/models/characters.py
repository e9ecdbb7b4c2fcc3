"""A small GPT that learns the text of Python's language reference character by character.

The text is part of Python itself, in the module pydoc_data.topics: about 460,000 characters. The last tenth is held
out.
"""

from pydoc_data.topics import topics

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.models.gpt import Gpt

HELD_OUT = 0.1


class Characters(Gpt):
    """The layers, the loss and the data of the language model."""

    def __init__(self, width: int, heads: int, blocks: int, length: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        letters = sorted(set(text))
        super().__init__(len(letters), width, heads, blocks, length)
        number = {letter: index for index, letter in enumerate(letters)}
        # An array of NumPy, which torch's device for shapes alone leaves as it is.
        self._text = np.array([number[letter] for letter in text])
        self._trained = int(len(text) * (1 - HELD_OUT))

    def samples(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return characters at random places and, as targets, the next ones, both int64, B x T, for B = ``count``."""
        random = np.random.Philox(key=1, counter=first).random_raw(4 * count)[::4]
        return self._windows((random % (self._trained - self._length)).astype(np.int64))

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return the held-out text in the form of `samples`."""
        return self._windows(np.arange(self._trained, len(self._text) - self._length - 1, self._length))

    def _windows(self, starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        sequences = torch.from_numpy(self._text[starts[:, None] + np.arange(self._length + 1)])
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def build(*, width: int = 64, heads: int = 4, blocks: int = 4, length: int = 64) -> Characters:
    """Return the model; its initial parameters follow `torch.manual_seed`.

    Args:
        width: Numbers per character between layers, a multiple of ``heads``.
        heads: Number of attention heads.
        blocks: Number of transformer blocks; the model's further layers are the embedding and the head.
        length: Characters in a sequence.
    """
    return Characters(width, heads, blocks, length)
