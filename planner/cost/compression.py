"""How many bytes a transfer between stages has on the wire; both backends ask here."""

from collections.abc import Mapping
from types import MappingProxyType

from planner.scenario.cluster import Cluster

# What stages pass on is float32.
_ELEMENT_BYTES = 4

# Bytes of one element, and of what goes with each sample: a float32 scale for 8-bit integers.
_FORMS: Mapping[str, tuple[int, int]] = MappingProxyType({"bf16": (2, 0), "int8": (1, 4)})


def wire_bytes(compression: str, samples: int, sample_bytes: int) -> int:
    """Return the bytes on the wire of an activation or its gradient.

    Args:
        compression: One of `planner.plan.plan.COMPRESSIONS`.
        samples: That the transfer carries.
        sample_bytes: Of one of them as float32; what is left of a last element counts as a whole one.
    """
    if compression == "none":
        return samples * sample_bytes
    element_bytes, scale_bytes = _FORMS[compression]
    elements = -(-sample_bytes // _ELEMENT_BYTES)
    return samples * (elements * element_bytes + scale_bytes) if elements else 0


def compression_between(compression: str, cluster: Cluster, source: str, target: str) -> str:
    """Return a plan's compression for what one device sends another: only what leaves its region is compressed."""
    return compression if cluster.crosses_regions(source, target) else "none"
