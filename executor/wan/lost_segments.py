"""Loses single segments of a super-packet, which then has to become several packets."""

import struct
from collections.abc import Sequence
from itertools import pairwise

from executor.wan.packet import payload_start, segment_bytes, tcp_start
from executor.wan.tun import HEADER_BYTES

_NO_SEGMENTATION = 0

_FIN_PSH = 0x09
_CWR = 0x80


def without_segments(packet: bytes, segments: int, lost: Sequence[int]) -> list[tuple[bytes, int]]:
    """Return what is left of a packet of so many segments when some are gone: packets, and the segments of each.

    Args:
        packet: As the TUN device gave it.
        segments: How many it stands for.
        lost: Numbers of those that are gone, rising.
    """
    bounds = [(before + 1, after) for before, after in pairwise([-1, *lost, segments])]
    return [(_cut(packet, first, end, segments), end - first) for first, end in bounds if first < end]


def _cut(packet: bytes, first: int, end: int, segments: int) -> bytes:
    """The segments ``first`` up to ``end`` as a packet of their own."""
    start, tcp, step = payload_start(packet), tcp_start(packet), segment_bytes(packet)
    payload = packet[start + first * step : start + end * step]
    headers = bytearray(packet[:start])
    if end - first == 1:
        headers[1] = _NO_SEGMENTATION
        headers[4:6] = bytes(2)
    size_bytes = start - HEADER_BYTES + len(payload)
    _rewrite_ip(headers, tcp, size_bytes, first)
    (sequence,) = struct.unpack_from("!I", headers, tcp + 4)
    struct.pack_into("!I", headers, tcp + 4, (sequence + first * step) & 0xFFFFFFFF)
    # As the kernel's own segmentation does: the end is said in the last segment, a smaller window in the first.
    headers[tcp + 13] &= 0xFF if end == segments else ~_FIN_PSH & 0xFF
    headers[tcp + 13] &= 0xFF if first == 0 else ~_CWR & 0xFF
    # The check sum is still that of the pseudo-header alone, of which the length is a part.
    (partial,) = struct.unpack_from("!H", headers, tcp + 16)
    change = struct.pack("!HHH", partial, 0xFFFF - (len(packet) - HEADER_BYTES), size_bytes)
    struct.pack_into("!H", headers, tcp + 16, _ones_sum(change))
    return bytes(headers) + payload


def _rewrite_ip(headers: bytearray, tcp: int, size_bytes: int, first: int) -> None:
    """Give the header of IPv4 its new length, the identity of its first segment, and its check sum."""
    (identity,) = struct.unpack_from("!H", headers, HEADER_BYTES + 4)
    struct.pack_into("!HH", headers, HEADER_BYTES + 2, size_bytes, (identity + first) & 0xFFFF)
    struct.pack_into("!H", headers, HEADER_BYTES + 10, 0)
    struct.pack_into("!H", headers, HEADER_BYTES + 10, 0xFFFF - _ones_sum(headers[HEADER_BYTES:tcp]))


def _ones_sum(data: bytes | bytearray) -> int:
    """The sum of 16-bit words in ones' complement (RFC 1071); ``data`` is of even length."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
