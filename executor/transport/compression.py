"""Compression of float32 activations and gradients; `planner.cost.network.wire_bytes` gives the sizes."""

import torch

from planner.plan.plan import COMPRESSIONS

# int8 stores each value as a whole number from -127 to 127, times a scale of its sample.
_LARGEST = 127
_SCALE_BYTES = torch.float32.itemsize


def pack(compression: str, values: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the compressed values, which may share memory with ``values``.

    - ``none``: the values as they are.
    - ``bf16``: each value rounded to the nearest bfloat16, ties to even; the relative error is at most 2⁻⁸. NaN and
      infinities are kept, and a value larger than any bfloat16 becomes infinite.
    - ``int8``: each value as a whole number of 127ths of its sample's largest absolute value, rounded to the nearest,
      ties to even; the error is at most a 254th of that. Zeros stay zeros. If a sample holds a NaN or an infinity, no
      scale fits and all of the sample becomes NaN, so that the fault shows at the receiver. Values below 2⁻¹²⁶ may
      become zero.

    Args:
        compression: One of `planner.plan.plan.COMPRESSIONS`.
        values: A float32 tensor of any shape; the values of a sample are contiguous, and samples are equally large.
        samples: Number of samples, at least 1.

    Returns:
        A one-dimensional uint8 tensor of `planner.cost.network.wire_bytes` bytes.
    """
    assert compression in COMPRESSIONS, compression
    rows = values.reshape(samples, -1)
    if compression == "int8":
        return _pack_int8(rows)
    if compression == "bf16":
        rows = rows.to(torch.bfloat16)
    return rows.contiguous().view(torch.uint8).view(-1)


def unpack(compression: str, payload: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the values as a one-dimensional float32 tensor, which may share memory with ``payload``.

    Args:
        compression: The compression that `pack` was given.
        payload: The result of `pack`, in memory aligned to 4 bytes.
        samples: Number of samples that it holds.
    """
    if compression == "int8":
        scales, numbers = _int8_parts(payload, samples)
        # torch takes twenty times as long to multiply int8 by float32 directly.
        return numbers.to(torch.float32).mul_(scales).view(-1)
    return payload.view(torch.bfloat16 if compression == "bf16" else torch.float32).to(torch.float32)


def _pack_int8(values: torch.Tensor) -> torch.Tensor:
    # Scales come first, where they are aligned for any number of values.
    packed = torch.empty(len(values) * _SCALE_BYTES + values.numel(), dtype=torch.uint8, device=values.device)
    scales, numbers = _int8_parts(packed, len(values))
    scales.copy_(_scales(values))
    numbers.copy_((values / scales).round_().nan_to_num_(nan=0.0))
    return packed


def _int8_parts(payload: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the scales, samples x 1, and of the numbers, samples x values."""
    end = samples * _SCALE_BYTES
    scales = payload[:end].view(torch.float32).view(samples, 1)
    return scales, payload[end:].view(torch.int8).view(samples, -1)


def _scales(values: torch.Tensor) -> torch.Tensor:
    """Return the 127th of each sample's largest absolute value, samples x 1; NaN where that is not finite."""
    largest = torch.maximum(values.amax(dim=1, keepdim=True), -values.amin(dim=1, keepdim=True))
    # Denormal scales have too few digits to divide by. A product, unlike a quotient, is never rounded up to a scale
    # whose 127-fold overflows.
    scales = (largest * (1 / _LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(torch.isfinite(scales), scales, torch.nan)
