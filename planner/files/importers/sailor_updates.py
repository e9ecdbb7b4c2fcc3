"""What the update times of eth-easl/sailor mean: one figure for a few layers together.

All layers of a row of times carry the same update time, though an embedding has four times the parameters of a block.
It is that of one optimizer step over the layers that were measured, embedding and head among them: so read, Adam moves
its 28 bytes per fp32 parameter (reads parameter, gradient and two moments, writes all but the gradient) at 750 GB/s on
V100 and at 1240 GB/s on A100 for OPT-350, GPT-Neo-2.7 and OPT-30 alike, 84 and 80 % of what these memories can. Read
as a layer's own, or a model's, the figures give rates that differ by an order of magnitude, or that no memory reaches.
"""

from collections.abc import Mapping
from statistics import median

Row = Mapping[int, tuple[float, float, float]]


def updates_s(rows: Mapping[int, Row], parameter_bytes: Mapping[int, int]) -> dict[int, float]:
    """Return the seconds that updating each layer takes: its part, by parameters, of the layers measured together.

    Args:
        rows: Microbatch to layer to [forward s, backward s, update s]; the update does not depend on the microbatch.
        parameter_bytes: Of each layer.
    """
    per_byte_s = median(_per_byte_s(row, parameter_bytes) for row in rows.values())
    return {layer: per_byte_s * size_bytes for layer, size_bytes in parameter_bytes.items()}


def _per_byte_s(row: Row, parameter_bytes: Mapping[int, int]) -> float:
    updated_bytes = sum(parameter_bytes[layer] for layer in measured_layers(row))
    return max(update_s for *_, update_s in row.values()) / updated_bytes if updated_bytes else 0.0


def measured_layers(row: Row) -> list[int]:
    """Return the layers whose times do not repeat those of the layer before: the others are copies."""
    return [layer for layer in sorted(row) if layer - 1 not in row or row[layer][:2] != row[layer - 1][:2]]
