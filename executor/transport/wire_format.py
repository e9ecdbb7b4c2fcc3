"""Holds what a stage puts out against the plan before it travels: gloo ends a process that receives more."""

from collections.abc import Mapping
from typing import Protocol

import torch

from executor.core.step_program import Transfer
from executor.transport.compression import pack, unpack
from planner.cost.network import wire_bytes
from planner.plan.actions import Kind
from planner.scenario.cluster import Cluster
from traces.common.errors import InputError

# Neighbouring ranks are at most a step apart and post a step ahead; four keep the tags of different steps apart.
_STEPS_APART = 4
_MESSAGES_PER_STEP = 1 << 26
_TRANSFERS: Mapping[Kind, int] = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1}
_SYNC, _NORM, _UPDATE, _MOVE, _BACKUP = 2, 3, 4, 5, 6
_CODES = 7

# Of no message: who waits for it waits in vain.
NO_MESSAGE = 2**31 - 1

# Microbatches of one stage; a pair of devices may exchange for several stages.
_MOST_MICROBATCHES = 1 << 16
# A ring of n devices takes 2(n - 1) rounds.
_MOST_ROUNDS = 1 << 12


def transfer_tag(step: int, transfer: Transfer) -> int:
    """Return the tag of a transfer between two stages."""
    assert transfer.microbatch < _MOST_MICROBATCHES
    return _tag(step, _TRANSFERS[transfer.kind], transfer.stage * _MOST_MICROBATCHES + transfer.microbatch)


def sync_tag(step: int, first_layer: int, number: int) -> int:
    """Return the tag of round ``number`` of the sum of the gradients from ``first_layer`` on."""
    assert number < _MOST_ROUNDS
    return _tag(step, _SYNC, first_layer * _MOST_ROUNDS + number)


def norm_tag(step: int) -> int:
    """Return the tag of a part, or of the whole, of the gradients' norm."""
    return _tag(step, _NORM, 0)


def update_tag(step: int, first_layer: int) -> int:
    """Return the tag of an update that a pipeline sends another, of the layers from ``first_layer`` on."""
    return _tag(step, _UPDATE, first_layer)


def move_tag(step: int, number: int) -> int:
    """Return the tag of a move of layers before ``step``, by its number in the migration."""
    return _tag(step, _MOVE, number)


def backup_tag(step: int, number: int) -> int:
    """Return the tag of a copy of layers as they are before ``step``, by its number among the moves of backups."""
    return _tag(step, _BACKUP, number)


def _tag(step: int, code: int, index: int) -> int:
    assert index < _MESSAGES_PER_STEP
    return ((step % _STEPS_APART) * _CODES + code) * _MESSAGES_PER_STEP + index


# Payloads are float32.
_ELEMENT_BYTES = 4


class Wire(Protocol):
    """Turns payloads into what travels, and back; both are uint8, one-dimensional."""

    def pack(self, transfer: Transfer, payload: torch.Tensor) -> torch.Tensor:
        """Return what travels."""

    def payload_bytes(self, transfer: Transfer) -> int:
        """Return the size of the payload that travels as the transfer says."""

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return what `pack` was given, or something near it."""


class AsItIs:
    """For payloads that have their size on the wire already."""

    def pack(self, transfer: Transfer, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload."""
        return payload

    def payload_bytes(self, transfer: Transfer) -> int:
        """Return the transfer's size."""
        return transfer.size_bytes

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return the payload."""
        return packed


class Compressing:
    """Compresses float32 payloads between regions.

    Args:
        compression: One of `planner.plan.plan.COMPRESSIONS`.
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

    def payload_bytes(self, transfer: Transfer) -> int:
        """Return the size as float32: the inverse of `planner.cost.network.wire_bytes`."""
        if not self._crosses(transfer) or not transfer.size_bytes:
            return transfer.size_bytes
        samples = transfer.end - transfer.first
        # A sample's first element may bring a scale with it; each further one takes as much as the second.
        one, two = (wire_bytes(self._compression, 1, elements * _ELEMENT_BYTES) for elements in (1, 2))
        elements = 1 + (transfer.size_bytes // samples - one) // (two - one)
        return samples * elements * _ELEMENT_BYTES

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return the payload as float32 bytes."""
        if not self._crosses(transfer):
            return packed
        return unpack(self._compression, packed, transfer.end - transfer.first).view(torch.uint8)

    def _crosses(self, transfer: Transfer) -> bool:
        return self._cluster.crosses_regions(transfer.source, transfer.target)


class CheckedWire:
    """A wire that refuses payloads of another size than the receiver waits for.

    Args:
        wire: How they look.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def pack(self, transfer: Transfer, payload: torch.Tensor) -> torch.Tensor:
        """Return what travels.

        Raises:
            InputError: The model's output has not the size that its profile promised; names the stage.
        """
        # Before it is packed: what has another size may not be divided into samples.
        expected_bytes = self._wire.payload_bytes(transfer)
        if payload.numel() != expected_bytes:
            raise InputError(
                f"stage {transfer.sending_stage} sends {payload.numel()} bytes for samples {transfer.first} to "
                f"{transfer.end - 1} of microbatch {transfer.microbatch}, and the plan says {expected_bytes}",
                valid="a layer must put out the same shape for every sample in every step",
            )
        return self._wire.pack(transfer, payload)

    def payload_bytes(self, transfer: Transfer) -> int:
        """Return the size of the payload that travels as the transfer says."""
        return self._wire.payload_bytes(transfer)

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return the payload."""
        return self._wire.unpack(transfer, packed)
