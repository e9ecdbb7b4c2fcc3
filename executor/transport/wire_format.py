"""The format of messages between ranks: their tags, and the compressed bytes of activations and gradients."""

from collections.abc import Mapping

import torch

from executor.core.step_program import Transfer
from planner.cost.network import wire_bytes
from planner.plan.actions import Kind
from planner.scenario.cluster import Cluster
from planner.scenario.training import COMPRESSIONS
from traces.common.errors import InputError

# With int8 a value is a whole number from -127 to 127 times the scale of its sample.
_LARGEST = 127
_SCALE_BYTES = torch.float32.itemsize


def pack(compression: str, values: torch.Tensor, samples: int) -> torch.Tensor:
    """Return the compressed values, which may share memory with ``values``.

    - ``none``: the values as they are.
    - ``bf16``: each value rounded to the nearest bfloat16, ties to even; the relative error is at most 2⁻⁸. NaN and
      infinities are kept, and a value larger than any bfloat16 becomes infinite.
    - ``int8``: each value as a multiple of its sample's scale, the largest absolute value of the sample divided by 127,
      rounded to the nearest, ties to even; the error is at most half a scale. Zeros stay zeros. If a sample contains a
      NaN or an infinity, all of its values become NaN, so that the receiver sees the fault. Absolute values below 2⁻¹²⁶
      may become zero.

    Args:
        compression: One of `planner.scenario.training.COMPRESSIONS`.
        values: A tensor of any shape and floating-point type; the values of a sample are contiguous, and samples are
            equally large.
        samples: Number of samples, at least 1.

    Returns:
        A one-dimensional uint8 tensor of `planner.cost.network.wire_bytes` bytes.
    """
    assert compression in COMPRESSIONS, compression
    rows = values.reshape(samples, -1)
    if compression == "int8":
        return _pack_int8(rows.to(torch.float32))
    if compression == "bf16":
        rows = rows.to(torch.bfloat16)
    return rows.contiguous().view(torch.uint8).view(-1)


def unpack(compression: str, payload: torch.Tensor, samples: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values as a one-dimensional tensor of type ``dtype``, which may share memory with ``payload``.

    Args:
        compression: The compression that `pack` was given.
        payload: The result of `pack`, in memory aligned to 4 bytes.
        samples: Number of samples in the payload.
        dtype: The type of the values that `pack` was given.
    """
    if compression == "int8":
        scales, numbers = _int8_parts(payload, samples)
        # Convert first: torch takes twenty times as long to multiply int8 by float32.
        return numbers.to(torch.float32).mul_(scales).view(-1).to(dtype)
    return payload.view(torch.bfloat16 if compression == "bf16" else dtype).to(dtype)


def _pack_int8(values: torch.Tensor) -> torch.Tensor:
    # The scales are at the start, since they must be aligned to 4 bytes for any number of values.
    packed = torch.empty(len(values) * _SCALE_BYTES + values.numel(), dtype=torch.uint8, device=values.device)
    scales, numbers = _int8_parts(packed, len(values))
    scales.copy_(_scales(values))
    numbers.copy_((values / scales).round_().nan_to_num_(nan=0.0))
    return packed


def _int8_parts(payload: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the scales, float32 (samples, 1), and of the numbers, int8 (samples, values per sample)."""
    end = samples * _SCALE_BYTES
    scales = payload[:end].view(torch.float32).view(samples, 1)
    return scales, payload[end:].view(torch.int8).view(samples, -1)


def _scales(values: torch.Tensor) -> torch.Tensor:
    """Return each sample's largest absolute value divided by 127, shape (samples, 1); NaN where it is not finite."""
    largest = torch.maximum(values.amax(dim=1, keepdim=True), -values.amin(dim=1, keepdim=True))
    # Avoid denormal scales, which have too few digits. The product with 1/127, unlike the quotient by 127, is never
    # rounded up so far that 127 times the scale overflows.
    scales = (largest * (1 / _LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(torch.isfinite(scales), scales, torch.nan)


# A tag must be unique among all messages that can be in transit between two devices. Neighbouring ranks are at most one
# step apart and post one step ahead, so tags may repeat after four steps.
_STEPS_APART = 4
_MESSAGES_PER_STEP = 1 << 26
_TRANSFERS: Mapping[Kind, int] = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1}
_SYNC, _NORM, _UPDATE, _MIGRATION, _BACKUP, _PROBE = 2, 3, 4, 5, 6, 7
_CODES = 8

# The tag of a receive to which no message is sent.
NO_MESSAGE = 2**31 - 1

# Upper bounds: of the microbatches of a stage, and of the rounds of a gradient sum (2(n - 1) in a ring of n devices).
_MOST_MICROBATCHES = 1 << 16
_MOST_ROUNDS = 1 << 12


def transfer_tag(step: int, transfer: Transfer) -> int:
    """Return the tag of a transfer between two stages."""
    assert transfer.microbatch < _MOST_MICROBATCHES
    return _tag(step, _TRANSFERS[transfer.kind], transfer.stage * _MOST_MICROBATCHES + transfer.microbatch)


def answer_tag(tag: int, *, from_first: bool) -> int:
    """Return the tag of the answer to the notice of a transfer between two devices.

    Answers go from the first of the two ranks to the other one, in a process group of their own. Transfers of both
    directions may have the same tag, so that those from the other rank get the tag of a code that transfers do not use.
    """
    assert tag // _MESSAGES_PER_STEP % _CODES in _TRANSFERS.values()
    return tag if from_first else tag + _SYNC * _MESSAGES_PER_STEP


def sync_tag(step: int, key: int, number: int) -> int:
    """Return the tag of round ``number`` of the gradient sum with this `GradientSync.key`."""
    assert number < _MOST_ROUNDS
    return _tag(step, _SYNC, key * _MOST_ROUNDS + number)


def probe_tag(step: int) -> int:
    """Return the tag of a probe of the path between two devices."""
    return _tag(step, _PROBE, 0)


def norm_tag(step: int) -> int:
    """Return the tag of a message with a partial or total norm of the gradients."""
    return _tag(step, _NORM, 0)


def update_tag(exchange: int, first_layer: int, *, of_means: bool = False) -> int:
    """Return the tag of an update between pipelines that starts at layer ``first_layer``, or of one of means."""
    return _tag(exchange, _UPDATE, 2 * first_layer + of_means)


def move_tag(step: int, number: int) -> int:
    """Return the tag of transfer ``number`` of the migration before ``step``."""
    return _tag(step, _MIGRATION, number)


def backup_tag(step: int, number: int) -> int:
    """Return the tag of transfer ``number`` of the backup of layers before ``step``."""
    return _tag(step, _BACKUP, number)


def is_of_training(tag: int) -> bool:
    """Return whether a message carries activations, their gradients, or a part of a sum of gradients."""
    return tag // _MESSAGES_PER_STEP % _CODES in (*_TRANSFERS.values(), _SYNC)


def _tag(step: int, code: int, index: int) -> int:
    assert index < _MESSAGES_PER_STEP
    return ((step % _STEPS_APART) * _CODES + code) * _MESSAGES_PER_STEP + index


class UncheckedWire:
    """Sends payloads unchanged, for paced compute, whose payloads have the size of the compressed message already."""

    def pack(self, transfer: Transfer, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload unchanged."""
        return payload

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return the payload unchanged."""
        return packed


class CompressedWire:
    """Sends payloads, compressed between regions, and refuses payloads whose size differs from the plan's.

    gloo would abort the receiving process if a message were larger than its posted receive.

    Args:
        compression: One of `planner.scenario.training.COMPRESSIONS`.
        cluster: The cluster, whose regions determine which messages are compressed.
        dtype: Type of the numbers in payloads.
    """

    def __init__(self, compression: str, cluster: Cluster, dtype: torch.dtype) -> None:
        self._compression = compression
        self._cluster = cluster
        self._dtype = dtype

    def pack(self, transfer: Transfer, payload: torch.Tensor) -> torch.Tensor:
        """Return the bytes to send, compressed between regions; raise `InputError` if the payload's size is wrong."""
        # Check before packing, since a payload of another size may not be divisible by the number of samples.
        expected_bytes = self.payload_bytes(transfer)
        if payload.numel() != expected_bytes:
            raise InputError(
                f"stage {transfer.sending_stage} sends {payload.numel()} bytes for samples {transfer.first} to "
                f"{transfer.end - 1} of microbatch {transfer.microbatch}, but the plan expects {expected_bytes}",
                valid="a layer's output must have the same shape for every sample in every step",
            )
        if not self._compresses(transfer):
            return payload
        return pack(self._compression, payload.view(self._dtype), transfer.end - transfer.first)

    def unpack(self, transfer: Transfer, packed: torch.Tensor) -> torch.Tensor:
        """Return the payload before it was compressed, as bytes."""
        if not self._compresses(transfer):
            return packed
        return unpack(self._compression, packed, transfer.end - transfer.first, self._dtype).view(torch.uint8)

    def payload_bytes(self, transfer: Transfer) -> int:
        """Return the size of an uncompressed payload in bytes: the inverse of `planner.cost.network.wire_bytes`."""
        if not self._compresses(transfer) or not transfer.size_bytes:
            return transfer.size_bytes
        samples = transfer.end - transfer.first
        # The first element of a sample may include a scale; each further element takes as many bytes as the second.
        number_bytes = self._dtype.itemsize
        one, two = (wire_bytes(self._compression, 1, numbers * number_bytes, number_bytes) for numbers in (1, 2))
        numbers = 1 + (transfer.size_bytes // samples - one) // (two - one)
        return samples * numbers * number_bytes

    def _compresses(self, transfer: Transfer) -> bool:
        return self._compression != "none" and self._cluster.crosses_regions(transfer.source, transfer.target)


# Converts payloads to the bytes on the wire and back; both are one-dimensional uint8 tensors.
Wire = UncheckedWire | CompressedWire
