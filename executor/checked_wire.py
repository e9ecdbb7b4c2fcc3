"""Holds what a stage puts out against the plan before it travels: gloo ends a process that receives more."""

import torch

from executor.wire import Wire
from planner.program import Transfer
from traces.errors import InputError


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
        packed = self._wire.pack(transfer, payload)
        if packed.numel() != transfer.size_bytes:
            raise InputError(
                f"stage {transfer.sending_stage} sends {packed.numel()} bytes for samples {transfer.first} to "
                f"{transfer.end - 1} of microbatch {transfer.microbatch}, and the plan says {transfer.size_bytes}",
                valid="a layer must put out the same shape for every sample in every step",
            )
        return packed

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return the payload."""
        return self._wire.unpack(transfer, packed)
