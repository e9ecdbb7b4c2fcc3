"""The norm of gradients, as good as the same however layers are grouped into stages and stages onto ranks."""

from collections.abc import Sequence

import torch


def squared_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the squared Euclidean norm of gradients.

    Each one's squares are summed in float64 by itself, and so are the sums: another grouping moves the whole by some
    1e-16 of it, and what float32 gradients are scaled by, a factor rounded to float32, all but never.
    """
    if not gradients:
        return 0.0
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    # One number comes from the device, and not one for each parameter.
    return float(torch.stack(norms).square().sum())
