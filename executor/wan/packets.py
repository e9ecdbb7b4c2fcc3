"""Packets on their way over the links of the test bed, from one to the next; pure, without clock or device."""

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from executor.wan.emulated_link import EmulatedLink
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


@dataclass(frozen=True, slots=True)
class Route:
    """How packets get from one host to another.

    Attributes:
        links: One after the other; none where packets pass at once.
        target: File descriptor of the TUN device where they come out.
    """

    links: tuple[EmulatedLink, ...]
    target: int


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A packet of so many segments that is on the link ``route.links[hop]`` until ``release_s``."""

    release_s: float
    packet: bytes
    segments: int
    route: Route
    hop: int


class InTransitQueue:
    """All packets that are on a link, each link's in its order."""

    def __init__(self) -> None:
        self._numbers: dict[EmulatedLink, int] = {}
        self._crossings: list[deque[_Crossing]] = []
        # When the first packet of each link that carries any is due, and the link's number.
        self._next: list[tuple[float, int]] = []

    def take(self, packet: bytes, route: Route, now_s: float) -> None:
        """Let a packet enter the first link of its route."""
        self._enter(packet, count_segments(packet), route, 0, now_s)

    @property
    def next_s(self) -> float:
        """When something has to be done next, machine seconds; infinite if nothing is under way."""
        return self._next[0][0] if self._next else inf

    def arrived(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Move on what is due by ``now_s``; yield the packets that are through, each with where it comes out."""
        while self._next and self._next[0][0] <= now_s:
            _, number = heappop(self._next)
            crossings = self._crossings[number]
            crossing = crossings.popleft()
            if crossings:
                heappush(self._next, (crossings[0].release_s, number))
            route, hop = crossing.route, crossing.hop + 1
            if hop < len(route.links):
                self._enter(crossing.packet, crossing.segments, route, hop, crossing.release_s)
            else:
                yield route.target, crossing.packet

    def _enter(self, packet: bytes, segments: int, route: Route, hop: int, now_s: float) -> None:
        link = route.links[hop]
        release_s = link.accept(now_s, frames_bytes(packet, segments), segments)
        if release_s is None:
            return
        lost = link.lose(segments)
        left = without_segments(packet, segments, lost) if lost else [(packet, segments)]
        crossings = self._crossings[self._number(link)]
        if left and not crossings:
            heappush(self._next, (release_s, self._number(link)))
        crossings.extend(_Crossing(release_s, part, count, route, hop) for part, count in left)

    def _number(self, link: EmulatedLink) -> int:
        if link not in self._numbers:
            self._numbers[link] = len(self._crossings)
            self._crossings.append(deque())
        return self._numbers[link]
