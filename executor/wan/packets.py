"""Packets of the test bed: their size on the wire, their segments, and their way over one link after the other.

A packet is what a TUN device returns: a struct virtio_net_hdr (little-endian, virtio specification), then IPv4 (RFC
791), then mostly TCP (RFC 9293). TCP writes super-packets of up to 64 KiB, whose header gives the size of the segments
that they stand for.
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

# A frame's header; its checksum and the gap between frames are not counted, as in the simulator.
ETHERNET_BYTES = 14

_IPV4 = 4

_NO_SEGMENTATION = 0

_FIN_PSH = 0x09
_CWR = 0x80


def is_ipv4(packet: bytes) -> bool:
    """Return whether a packet is IPv4."""
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
    """Return the size of the Ethernet frames that carry a packet of this many segments, each with its own headers."""
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
    # As the kernel's own segmentation does: FIN and PSH only in the last segment, CWR only in the first.
    headers[tcp + 13] &= 0xFF if stop == segments else ~_FIN_PSH & 0xFF
    headers[tcp + 13] &= 0xFF if start == 0 else ~_CWR & 0xFF
    # The checksum is still that of the pseudo-header alone, which includes the length.
    (partial,) = struct.unpack_from("!H", headers, tcp + 16)
    change = struct.pack("!HHH", partial, 0xFFFF - (len(packet) - HEADER_BYTES), size_bytes)
    struct.pack_into("!H", headers, tcp + 16, _ones_sum(change))
    return bytes(headers) + payload


def _rewrite_ip(headers: bytearray, tcp: int, size_bytes: int, start: int) -> None:
    """Set the length of the IPv4 header, the identification of its first segment, and its checksum."""
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
    """The way of packets from one host to another.

    Attributes:
        links: The links in order; empty where packets pass at once.
        target: File descriptor of the TUN device where they arrive.
    """

    links: tuple[EmulatedLink, ...]
    target: int


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A packet that is on the link ``route.links[hop]`` until ``release_s``."""

    release_s: float
    packet: bytes
    segments: int
    route: Route
    hop: int


class InTransitQueue:
    """All packets that are on a link, in order on each link; pure, without clock or device."""

    def __init__(self) -> None:
        self._packets: defaultdict[EmulatedLink, deque[_InFlight]] = defaultdict(deque)
        # The release of the first packet on each link that carries any; the number breaks ties.
        self._next: list[tuple[float, int, EmulatedLink]] = []
        self._numbers = defaultdict[EmulatedLink, int](count().__next__)

    def put(self, packet: bytes, route: Route, now_s: float) -> None:
        """Let a packet enter the first link of its route."""
        self._enter(packet, count_segments(packet), route, 0, now_s)

    @property
    def next_s(self) -> float:
        """When the next packet leaves a link, machine seconds; infinite if there is none."""
        return self._next[0][0] if self._next else inf

    def arrived(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Move packets that are due by ``now_s`` to their next link; yield those that arrive, each with its target."""
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
