"""Tensors of whole samples as bytes on the CPU, and back."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


def computing_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context for forward computations of layers and loss.

    Args:
        precision: One of `planner.scenario.scenario.ELEMENT_BYTES`.
        device: Where they are computed.
    """
    if precision == "fp32":
        return nullcontext()
    assert precision == "bf16-mixed", precision
    return torch.autocast(device.type, torch.bfloat16)


def to_payload(samples: torch.Tensor) -> torch.Tensor:
    """Return the samples as a one-dimensional uint8 tensor on the CPU, which shares memory where it can."""
    row = samples.contiguous().view(-1).view(torch.uint8)
    if row.device.type != "cuda":
        return row.cpu()
    # Page-locked memory, which a GPU writes to directly and torch keeps for the next payload; the copy is waited for.
    return torch.empty(row.numel(), dtype=torch.uint8, pin_memory=True).copy_(row)


def from_payloads(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return one tensor of the samples of consecutive payloads.

    Args:
        parts: In the order of the samples.
        sizes: Shape of a sample.
        dtype: Of its numbers.
        device: Where the tensor is wanted.
    """
    row = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return row.view(dtype).view(-1, *sizes).to(device)
