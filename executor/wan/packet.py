"""What the relay has to know of a packet: where it goes, and how long it is on the wire.

A packet is what a TUN device gives: a struct virtio_net_hdr (little-endian, virtio specification), then IPv4 (RFC 791),
then mostly TCP (RFC 9293). TCP hands over super-packets of up to 64 KiB, whose header says how large the segments are
that they stand for.
"""

import struct
from collections.abc import Sequence
from itertools import pairwise

from executor.wan.linux import HEADER_BYTES

# A frame's own header; the check sum and the gap between frames are not counted, as in the simulator.
ETHERNET_BYTES = 14

_IPV4 = 4


def is_ipv4(packet: bytes) -> bool:
    """Return whether a packet is IPv4; nothing else is asked of the others."""
    return packet[HEADER_BYTES] >> 4 == _IPV4


def target_address(packet: bytes) -> bytes:
    """Return the four bytes of the address that a packet is for."""
    return packet[HEADER_BYTES + 16 : HEADER_BYTES + 20]


def is_super(packet: bytes) -> bool:
    """Return whether a packet stands for several segments."""
    return packet[1] != 0


def count_segments(packet: bytes) -> int:
    """Return how many frames a packet is on the wire."""
    if not is_super(packet):
        return 1
    return -(-(len(packet) - payload_start(packet)) // segment_bytes(packet))


def frames_bytes(packet: bytes, segments: int) -> int:
    """Return the size of the Ethernet frames that carry a packet of so many segments: each has headers of its own."""
    size_bytes = len(packet) - HEADER_BYTES + segments * ETHERNET_BYTES
    return size_bytes if segments == 1 else size_bytes + (segments - 1) * (payload_start(packet) - HEADER_BYTES)


def tcp_start(packet: bytes) -> int:
    """Return where the header of TCP starts in a packet."""
    return HEADER_BYTES + 4 * (packet[HEADER_BYTES] & 0x0F)


def payload_start(packet: bytes) -> int:
    """Return where TCP's payload starts in a packet."""
    tcp = tcp_start(packet)
    return tcp + 4 * (packet[tcp + 12] >> 4)


def segment_bytes(packet: bytes) -> int:
    """Return the payload of each segment, but for the last, that a super-packet stands for."""
    return packet[4] | packet[5] << 8


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
