"""Packets of the emulated network: their size on the wire, their segments, and the queue of packets in transit.

A packet consists of bytes read from a TUN device: a struct virtio_net_hdr (little-endian, virtio specification), an
IPv4 packet (RFC 791), and in it mostly TCP (RFC 9293). The kernel combines TCP segments to a super-packet of up to 64
KiB, whose virtio_net_hdr contains the size of the segments.
"""

import struct
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf

from executor.wan.emulated_link import EmulatedLink
from executor.wan.linux import HEADER_BYTES

# Header of an Ethernet frame; as in the simulator, the checksum and the gap between frames are not counted.
ETHERNET_BYTES = 14

_IPV4 = 4

_NO_SEGMENTATION = 0

_FIN_PSH = 0x09
_CWR = 0x80


def is_ipv4(packet: bytes) -> bool:
    """Return whether a packet is an IPv4 packet."""
    return packet[HEADER_BYTES] >> 4 == _IPV4


def target_address(packet: bytes) -> bytes:
    """Return the four bytes of an IPv4 packet's destination address."""
    return packet[HEADER_BYTES + 16 : HEADER_BYTES + 20]


def count_segments(packet: bytes) -> int:
    """Return the number of Ethernet frames that carry a packet."""
    if packet[1] == _NO_SEGMENTATION:
        return 1
    return -(-(len(packet) - _payload_start(packet)) // _segment_bytes(packet))


def frames_bytes(packet: bytes, segments: int) -> int:
    """Return the bytes of the Ethernet frames that carry a packet of ``segments`` segments, with headers for each."""
    size_bytes = len(packet) - HEADER_BYTES + segments * ETHERNET_BYTES
    return size_bytes if segments == 1 else size_bytes + (segments - 1) * (_payload_start(packet) - HEADER_BYTES)


def _tcp_start(packet: bytes) -> int:
    return HEADER_BYTES + 4 * (packet[HEADER_BYTES] & 0x0F)


def _payload_start(packet: bytes) -> int:
    tcp = _tcp_start(packet)
    return tcp + 4 * (packet[tcp + 12] >> 4)


def _segment_bytes(packet: bytes) -> int:
    """Return the payload of each segment of a super-packet except the last."""
    return packet[4] | packet[5] << 8


def without_segments(packet: bytes, segments: int, lost: Sequence[int]) -> list[tuple[bytes, int]]:
    """Return the packets that remain when some segments of a packet are lost, each with its number of segments."""
    ranges = [(before + 1, after) for before, after in pairwise([-1, *lost, segments])]
    return [(_cut(packet, start, stop, segments), stop - start) for start, stop in ranges if start < stop]


def _cut(packet: bytes, start: int, stop: int, segments: int) -> bytes:
    """Return the segments ``start`` to ``stop - 1`` as a packet of their own."""
    payload_start, tcp, step = _payload_start(packet), _tcp_start(packet), _segment_bytes(packet)
    payload = packet[payload_start + start * step : payload_start + stop * step]
    headers = bytearray(packet[:payload_start])
    if stop - start == 1:
        headers[1] = _NO_SEGMENTATION
        headers[4:6] = bytes(2)
    size_bytes = payload_start - HEADER_BYTES + len(payload)
    _rewrite_ip(headers, tcp, size_bytes, start)
    (sequence,) = struct.unpack_from("!I", headers, tcp + 4)
    struct.pack_into("!I", headers, tcp + 4, (sequence + start * step) & 0xFFFFFFFF)
    # As in the kernel's segmentation, the flags FIN and PSH are only in the last segment, CWR only in the first.
    headers[tcp + 13] &= 0xFF if stop == segments else ~_FIN_PSH & 0xFF
    headers[tcp + 13] &= 0xFF if start == 0 else ~_CWR & 0xFF
    # The field still has the checksum of the pseudo-header only, in which the length is replaced here.
    (partial,) = struct.unpack_from("!H", headers, tcp + 16)
    change = struct.pack("!HHH", partial, 0xFFFF - (len(packet) - HEADER_BYTES), size_bytes)
    struct.pack_into("!H", headers, tcp + 16, _ones_sum(change))
    return bytes(headers) + payload


def _rewrite_ip(headers: bytearray, tcp: int, size_bytes: int, start: int) -> None:
    """Set three fields of the IPv4 header: total length, identification (that of the first segment) and checksum."""
    (identity,) = struct.unpack_from("!H", headers, HEADER_BYTES + 4)
    struct.pack_into("!HH", headers, HEADER_BYTES + 2, size_bytes, (identity + start) & 0xFFFF)
    struct.pack_into("!H", headers, HEADER_BYTES + 10, 0)
    struct.pack_into("!H", headers, HEADER_BYTES + 10, 0xFFFF - _ones_sum(headers[HEADER_BYTES:tcp]))


def _ones_sum(data: bytes | bytearray) -> int:
    """Return the sum of 16-bit words in ones' complement (RFC 1071); ``data`` has an even length."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@dataclass(frozen=True, slots=True)
class Route:
    """The route of packets from one host to another.

    Attributes:
        links: The links in order; empty if packets arrive at once.
        target: File descriptor of the TUN device of the receiving host.
    """

    links: tuple[EmulatedLink, ...]
    target: int


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A packet that leaves the link ``route.links[hop]`` at the monotonic time ``release_s``."""

    release_s: float
    packet: bytes
    segments: int
    route: Route
    hop: int


class InTransitQueue:
    """All packets in transit, in order on each link; uses neither a clock nor a device itself."""

    def __init__(self) -> None:
        self._packets: defaultdict[EmulatedLink, deque[_InFlight]] = defaultdict(deque)
        # Heap of the links with packets, by the time at which the first packet leaves; a link's number breaks ties.
        self._next: list[tuple[float, int, EmulatedLink]] = []
        self._numbers = defaultdict[EmulatedLink, int](count().__next__)

    def put(self, packet: bytes, route: Route, now_s: float) -> None:
        """Put a packet on the first link of its route at the monotonic time ``now_s``."""
        self._enter(packet, count_segments(packet), route, 0, now_s)

    @property
    def next_s(self) -> float:
        """Monotonic time at which the next packet leaves a link; infinite if there is no packet."""
        return self._next[0][0] if self._next else inf

    def arrived(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Move packets that leave a link by ``now_s`` to the next link; yield those at their end: target and packet."""
        while self._next and self._next[0][0] <= now_s:
            _, _, link = heappop(self._next)
            packets = self._packets[link]
            first = packets.popleft()
            if packets:
                self._schedule(link, packets[0].release_s)
            route, hop = first.route, first.hop + 1
            if hop < len(route.links):
                self._enter(first.packet, first.segments, route, hop, first.release_s)
            else:
                yield route.target, first.packet

    def _enter(self, packet: bytes, segments: int, route: Route, hop: int, now_s: float) -> None:
        link = route.links[hop]
        release_s = link.accept(now_s, frames_bytes(packet, segments), segments)
        if release_s is None:
            return
        lost = link.lose(segments)
        left = without_segments(packet, segments, lost) if lost else [(packet, segments)]
        packets = self._packets[link]
        if left and not packets:
            self._schedule(link, release_s)
        packets.extend(_InFlight(release_s, part, count, route, hop) for part, count in left)

    def _schedule(self, link: EmulatedLink, release_s: float) -> None:
        heappush(self._next, (release_s, self._numbers[link], link))
