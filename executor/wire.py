"""How payloads look on the wire: as the compute makes them, or smaller between regions."""

from typing import Protocol

import torch

from executor.compression import pack, unpack
from planner.cluster import Cluster
from planner.program import Transfer


class Wire(Protocol):
    """Turns payloads into what travels, and back; both are uint8, one-dimensional."""

    def pack(self, transfer: Transfer, payload: torch.Tensor) -> torch.Tensor:
        """Return what travels."""

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return what `pack` was given, or something near it."""


class AsItIs:
    """For payloads that have their size on the wire already."""

    def pack(self, transfer: Transfer, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload."""
        return payload

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return the payload."""
        return packed


class Compressing:
    """Compresses float32 payloads between regions.

    Args:
        compression: One of `planner.plan.COMPRESSIONS`.
        cluster: Says what crosses regions.
    """

    def __init__(self, compression: str, cluster: Cluster) -> None:
        self._compression = compression
        self._cluster = cluster

    def pack(self, transfer: Transfer, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload, compressed if it crosses regions."""
        if not self._crosses(transfer):
            return payload
        return pack(self._compression, payload.view(torch.float32), transfer.end - transfer.first)

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return the payload as float32 bytes."""
        if not self._crosses(transfer):
            return packed
        return unpack(self._compression, packed, transfer.end - transfer.first).view(torch.uint8)

    def _crosses(self, transfer: Transfer) -> bool:
        return self._cluster.crosses_regions(transfer.source, transfer.target)
