"""The bytes of a layer's pseudo-gradient on the way to other pipelines: sparse, or in few bits.

Each layer, or part of one, is packed by itself, in chunks that depend on its size only. So every pipeline gets the same
values of it, wherever plans cut pipelines into stages.
"""

import torch

from executor.transport.wire_format import pack, unpack
from planner.plan.outer_step import INDEX_BYTES, OuterStep

# With int4 a value is a whole number from -7 to 7 times the scale of its chunk.
_LARGEST_INT4 = 7
_OFFSET_INT4 = 8


def pack_layer(settings: OuterStep, values: torch.Tensor) -> torch.Tensor:
    """Return the packed values of a layer.

    With a density below 1 only the largest absolute values of each chunk are kept, with their indices in the chunk. The
    values of a chunk are then packed together:

    - ``none`` and ``bf16``: as in `executor.transport.wire_format.pack`.
    - ``int8`` and ``int4``: as multiples of the chunk's largest absolute value divided by 127 or by 7. A chunk that
      contains a NaN or an infinity becomes NaN.

    Args:
        settings: The settings of the outer step, with compression and density.
        values: A one-dimensional float32 tensor.

    Returns:
        A one-dimensional uint8 tensor of `OuterStep.packed_bytes` bytes.
    """
    if not values.numel():
        return torch.zeros(0, dtype=torch.uint8)
    count, width, kept = settings.chunks(values.numel())
    rows = torch.nn.functional.pad(values, (0, count * width - values.numel())).view(count, width)
    if kept == width:
        return _pack_rows(settings.compression, rows)
    # NaN counts as largest, so that it is sent.
    indices = rows.abs().topk(kept, dim=1).indices.sort(dim=1).values
    found = _pack_rows(settings.compression, rows.gather(1, indices))
    return torch.cat([indices.to(torch.int16).view(torch.uint8).view(-1), found])


def unpack_layer(settings: OuterStep, payload: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the ``elements`` values of a layer that `pack_layer` has packed, as a float32 tensor."""
    if not elements:
        return torch.zeros(0)
    count, width, kept = settings.chunks(elements)
    # A layer's bytes may not be aligned to 4 bytes within a message; their copies are.
    if kept == width:
        return _unpack_rows(settings.compression, payload.clone(), count, kept).reshape(-1)[:elements]
    end = count * kept * INDEX_BYTES
    indices = payload[:end].clone().view(torch.int16).view(count, kept).to(torch.int64)
    rows = torch.zeros(count, width)
    rows.scatter_(1, indices, _unpack_rows(settings.compression, payload[end:].clone(), count, kept))
    return rows.view(-1)[:elements]


def _pack_rows(compression: str, rows: torch.Tensor) -> torch.Tensor:
    if compression != "int4":
        return pack(compression, rows, len(rows))
    scales = rows.abs().amax(dim=1, keepdim=True) / _LARGEST_INT4
    scales = torch.where(torch.isfinite(scales), scales.clamp_min(torch.finfo(torch.float32).tiny), torch.nan)
    numbers = (rows / scales).round_().nan_to_num_(nan=0.0).to(torch.int8) + _OFFSET_INT4
    if numbers.shape[1] % 2:
        numbers = torch.nn.functional.pad(numbers, (0, 1))
    halves = numbers.to(torch.uint8)
    packed = halves[:, ::2] | (halves[:, 1::2] << 4)
    return torch.cat([scales.view(torch.uint8).view(-1), packed.reshape(-1)])


def _unpack_rows(compression: str, payload: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Return the values as a float32 tensor of ``count`` rows of ``width`` values."""
    if compression != "int4":
        return unpack(compression, payload, count).view(count, width)
    end = count * torch.float32.itemsize
    scales = payload[:end].view(torch.float32).view(count, 1)
    packed = payload[end:].view(count, -1)
    numbers = torch.stack([packed & 15, packed >> 4], dim=2).view(count, -1)[:, :width]
    return (numbers.to(torch.float32) - _OFFSET_INT4) * scales
