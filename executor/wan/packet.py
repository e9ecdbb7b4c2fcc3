"""What the relay has to know of a packet: where it goes, and how long it is on the wire.

A packet is what a TUN device gives: a struct virtio_net_hdr (little-endian, virtio specification), then IPv4 (RFC 791),
then mostly TCP (RFC 9293). TCP hands over super-packets of up to 64 KiB, whose header says how large the segments are
that they stand for.
"""

from executor.wan.tun import HEADER_BYTES

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
