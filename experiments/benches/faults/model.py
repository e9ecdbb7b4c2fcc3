"""The small GPT of experiments/models/gpt.py, computed by one thread.

Otherwise sums would have another order, and so other roundings, on hosts with another number of ranks for their cores.
"""

import torch

from experiments.models.gpt import Gpt
from experiments.models.gpt import build as build_gpt


def build(*, vocabulary: int, width: int, heads: int, blocks: int, length: int) -> Gpt:
    """Return the model; see `experiments.models.gpt.build`."""
    torch.set_num_threads(1)
    return build_gpt(vocabulary=vocabulary, width=width, heads=heads, blocks=blocks, length=length)
