"""Profile of a path: its latency, and the rates of one and several connections in both directions."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from traces.probe.bursts import MOST_SECONDS, BurstRequest, Direction
from traces.probe.peer import Peer
from traces.statistics import ROUNDS, Interval, interval_of

# Number of timed round trips: as many as fit into this time, within the limits below.
_ECHOES_S = 3.0
_LEAST_ECHOES, _MOST_ECHOES = 12, 300

# Shortest burst, in seconds and in round trips: TCP windows have opened after two fifths of such a burst.
_LEAST_BURST_S = 2.5
_BURST_ROUND_TRIPS = 40
# Round trips in which a window of ten segments grows to a gigabyte.
_OPENING_ROUND_TRIPS = 16

# After a burst, queues count as empty when round trips are below the idle round trip times `_SETTLED` plus
# `_SETTLED_S`; the wait for empty queues lasts for `_SETTLING_S` at most.
_SETTLED = 1.2
_SETTLED_S = 1e-3
_SETTLING_S = 5.0

# A full window counts as the limit of a connection if several connections reach a rate higher by `_WINDOW_GAIN`, and if
# the bytes in flight are at least the share `_FLYING_SHARE` of the window: headers and bookkeeping take up the rest.
_WINDOW_GAIN = 1.1
_FLYING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class DirectionProfile:
    """Rates of a path in one direction.

    Attributes:
        rates_bps: Payload rate by number of connections, bits per second.
        full_windows_bytes: Buffer or window that limited the connections, bytes, by their number; None if neither did.
        short: Numbers of connections for which the burst may have ended before TCP windows had opened.
    """

    rates_bps: Mapping[int, Interval]
    full_windows_bytes: Mapping[int, float | None]
    short: tuple[int, ...]

    @property
    def best_bps(self) -> Interval:
        """Payload rate of the number of connections whose slowest round is fastest, bits per second.

        The slowest round decides because single rounds can exceed the rate of the path: TCP delivers the packets that
        follow a lost packet late and all at once.
        """
        return max(self.rates_bps.values(), key=lambda each: each.least)

    def window_bytes(self, round_trip_s: float) -> float | None:
        """Return the bytes in flight of a connection that a window limits; None if the window is not the limit."""
        fewest = min(self.rates_bps)
        rate_bps, full_bytes = self.rates_bps[fewest].median / fewest, self.full_windows_bytes[fewest]
        flying_bytes = rate_bps * round_trip_s / 8
        gains = self.best_bps.median >= _WINDOW_GAIN * rate_bps * fewest
        return flying_bytes if full_bytes is not None and gains and flying_bytes >= _FLYING_SHARE * full_bytes else None


@dataclass(frozen=True, slots=True)
class PathProfile:
    """A path between two hosts.

    Attributes:
        round_trip_s: Round trip of single packets on the idle path, seconds.
        least_round_trip_s: Shortest of these round trips, seconds.
    """

    round_trip_s: Interval
    least_round_trip_s: float
    directions: Mapping[Direction, DirectionProfile]

    @property
    def latency_s(self) -> float:
        """One-way latency: half of a round trip, seconds."""
        return self.round_trip_s.median / 2

    @property
    def jitter_s(self) -> float:
        """Largest additional delay of a packet one way, seconds.

        If delays are uniform, it is the mean additional delay of a round trip.
        """
        return self.round_trip_s.median - self.least_round_trip_s


def profile_path(
    peer: Peer, connections: Sequence[int], traffic_bytes: int, tell: Callable[[str], None]
) -> PathProfile:
    """Measure a path with each of these numbers of ``connections``; return its profile.

    Bursts send at most ``traffic_bytes`` in both directions together.

    Raises:
        PeerError: The connection to the other end was lost.
    """
    tell("round trips")
    echoes = _round_trips_s(peer)
    round_trip = interval_of(echoes)
    size_bytes = traffic_bytes // (2 * len(connections))
    seconds = min(MOST_SECONDS, max(_LEAST_BURST_S, _BURST_ROUND_TRIPS * round_trip.median))
    directions: dict[Direction, DirectionProfile] = {}
    for direction in ("there", "back"):
        rates: dict[int, Interval] = {}
        windows: dict[int, float | None] = {}
        short = []
        for count in connections:
            tell(f"{direction}: {count} connection{'s' if count > 1 else ''}")
            arrivals, windows[count] = peer.burst(BurstRequest(direction, size_bytes, seconds, count))
            found = arrivals.window_rates_bps(ROUNDS)
            rates[count] = interval_of(found or [0.0])
            if arrivals.complete and arrivals.warm_up_s < _OPENING_ROUND_TRIPS * round_trip.median:
                short.append(count)
            _settle(peer, round_trip.median)
        directions[direction] = DirectionProfile(rates, windows, tuple(short))
    return PathProfile(round_trip, min(echoes), directions)


def _round_trips_s(peer: Peer) -> list[float]:
    first_s = min(peer.round_trips_s(3))
    return peer.round_trips_s(min(_MOST_ECHOES, max(_LEAST_ECHOES, int(_ECHOES_S / first_s))))


def _settle(peer: Peer, round_trip_s: float) -> None:
    deadline_s = time.monotonic() + _SETTLING_S
    while time.monotonic() < deadline_s:
        if max(peer.round_trips_s(2)) < _SETTLED * round_trip_s + _SETTLED_S:
            return
