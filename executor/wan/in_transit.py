"""Packets on their way over the links of the test bed, from one to the next; pure, without clock or device."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from executor.wan.emulated_link import EmulatedLink
from executor.wan.packet import count_segments, frames_bytes, without_segments


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
