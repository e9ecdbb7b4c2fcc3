"""Holds what a stage puts out against the plan before it travels: gloo ends a process that receives more."""

import torch

from executor.core.program import Transfer
from executor.transport.wire import Wire
from traces.common.errors import InputError


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
