"""What layers compute in."""

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
