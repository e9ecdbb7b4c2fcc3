"""Makes float32 rows smaller for a slow link, and rows again; the sizes are those of planner/cost/network.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

# Whole numbers from -127 to 127 stand for a sample's values; each sample has a scale of its own.
_LARGEST = 127
_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class _Codec:
    """Turns samples x values into bytes, and back; bytes of ``samples`` samples."""

    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor, int], torch.Tensor]


def pack(compression: str, values: torch.Tensor, samples: int) -> torch.Tensor:
    """Return what travels; it may share memory with ``values``.

    - ``none``: the values as they are.
    - ``bf16``: each rounded to the nearest bfloat16, ties to even; off by at most 2⁻⁸ of itself. NaN and infinities
      stay what they are, and what is larger than any bfloat16 becomes infinite.
    - ``int8``: each a whole number of 127ths of the sample's largest absolute value, rounded to the nearest, ties to
      even; off by at most a 254th of it. Zeros stay zeros. Where a sample holds a NaN or an infinity no scale fits, and
      all of it becomes NaN: what has gone wrong shows at the other end. Values below 2⁻¹²⁶ may become zero.

    Args:
        compression: One of `planner.plan.plan.COMPRESSIONS`.
        values: float32, of any shape; the values of a sample stand together, and each sample has as many.
        samples: How many there are, one or more.

    Returns:
        uint8, one-dimensional, of `planner.cost.network.wire_bytes` bytes.
    """
    return _CODECS[compression].pack(values.reshape(samples, -1)).view(-1)


def unpack(compression: str, payload: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the values again: float32, one-dimensional; they may share memory with ``payload``.

    Args:
        compression: What it was packed with.
        payload: What `pack` returned; uint8, and its memory aligned to 4 bytes.
        samples: How many it holds.
    """
    return _CODECS[compression].unpack(payload, samples).view(-1)


def _pack_none(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _unpack_none(payload: torch.Tensor, samples: int) -> torch.Tensor:
    return payload.view(torch.float32)


def _pack_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).contiguous().view(torch.uint8)


def _unpack_bf16(payload: torch.Tensor, samples: int) -> torch.Tensor:
    return payload.view(torch.bfloat16).to(torch.float32)


def _pack_int8(values: torch.Tensor) -> torch.Tensor:
    # Scales first: there they are aligned, whatever the number of values.
    packed = torch.empty(len(values) * _SCALE_BYTES + values.numel(), dtype=torch.uint8, device=values.device)
    scales, numbers = _int8_parts(packed, len(values))
    scales.copy_(_scales(values))
    numbers.copy_((values / scales).round_().nan_to_num_(nan=0.0))
    return packed


def _unpack_int8(payload: torch.Tensor, samples: int) -> torch.Tensor:
    scales, numbers = _int8_parts(payload, samples)
    # Multiplying int8 by float32 directly takes torch twenty times as long.
    return numbers.to(torch.float32).mul_(scales)


def _int8_parts(payload: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the scales, samples x 1, and of the numbers, samples x values."""
    end = samples * _SCALE_BYTES
    scales = payload[:end].view(torch.float32).view(samples, 1)
    return scales, payload[end:].view(torch.int8).view(samples, -1)


def _scales(values: torch.Tensor) -> torch.Tensor:
    """The 127th of each sample's largest absolute value, samples x 1; NaN where that is not finite."""
    largest = torch.maximum(values.amax(dim=1, keepdim=True), -values.amin(dim=1, keepdim=True))
    # A normal number, also for zeros: smaller scales have too few digits to divide by. A product, unlike a quotient,
    # is never rounded to a scale whose 127-fold overflows.
    scales = (largest * (1 / _LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(torch.isfinite(scales), scales, torch.nan)


_CODECS: Mapping[str, _Codec] = MappingProxyType(
    {
        "none": _Codec(_pack_none, _unpack_none),
        "bf16": _Codec(_pack_bf16, _unpack_bf16),
        "int8": _Codec(_pack_int8, _unpack_int8),
    }
)
