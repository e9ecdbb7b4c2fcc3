"""A path measured once and thoroughly: latency, and what one and several connections carry in both directions."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from traces.probe.bursts import MOST_SECONDS, BurstOrder, Direction
from traces.probe.peer import Peer
from traces.statistics import ROUNDS, Interval, interval_of

# Round trips that are timed: as many as fit into a time.
_ECHOES_S = 3.0
_LEAST_ECHOES, _MOST_ECHOES = 12, 300

# A burst lasts so long, and so many round trips: windows have opened after two fifths of it.
_LEAST_BURST_S = 2.5
_BURST_ROUND_TRIPS = 40
# As many round trips open a window of ten segments to a gigabyte.
_OPENING_ROUND_TRIPS = 16

# What earlier bursts left in queues on the way is gone when round trips are nearly as short as before.
_SETTLED = 1.2
_SETTLED_S = 1e-3
_SETTLING_S = 5.0

# A full window is a connection's ceiling if more connections carry more, and if it is what is under way: of a send
# buffer headers and bookkeeping take a third, or more.
_WINDOW_GAIN = 1.1
_FLYING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class DirectionProfile:
    """What a path carries in one direction.

    Attributes:
        rates_bps: Payload by number of connections, bits per second.
        full_windows_bytes: By number of connections, the buffer or window that held them up; None if none did.
        short: Numbers of connections for which the bytes were used up before windows had surely opened.
    """

    rates_bps: Mapping[int, Interval]
    full_windows_bytes: Mapping[int, float | None]
    short: tuple[int, ...]

    @property
    def best_bps(self) -> Interval:
        """What the number of connections carries that carries most in its worst round, payload bits per second.

        Where packets get lost those that follow are handed over late and all at once, so that single rounds show more
        than the path can carry.
        """
        return max(self.rates_bps.values(), key=lambda each: each.least)

    def window_bytes(self, round_trip_s: float) -> float | None:
        """Return what one connection has under way at most; None where something else binds it."""
        fewest = min(self.rates_bps)
        rate_bps, full_bytes = self.rates_bps[fewest].median / fewest, self.full_windows_bytes[fewest]
        flying_bytes = rate_bps * round_trip_s / 8
        gains = self.best_bps.median >= _WINDOW_GAIN * rate_bps * fewest
        return flying_bytes if full_bytes is not None and gains and flying_bytes >= _FLYING_SHARE * full_bytes else None


@dataclass(frozen=True, slots=True)
class PathProfile:
    """A path between two hosts.

    Attributes:
        round_trip_s: Of single packets on the idle path.
        least_round_trip_s: The quickest of them.
        directions: What it carries.
    """

    round_trip_s: Interval
    least_round_trip_s: float
    directions: Mapping[Direction, DirectionProfile]

    @property
    def latency_s(self) -> float:
        """One way, seconds: half of a round trip."""
        return self.round_trip_s.median / 2

    @property
    def jitter_s(self) -> float:
        """How much longer than the quickest a packet takes one way at most, if delays are even; seconds.

        A round trip then takes as much longer in the mean.
        """
        return self.round_trip_s.median - self.least_round_trip_s


def profile_path(
    peer: Peer, connections: Sequence[int], traffic_bytes: int, tell: Callable[[str], None]
) -> PathProfile:
    """Measure.

    Args:
        peer: The session with the other end.
        connections: Numbers of connections to try, rising.
        traffic_bytes: That all of it takes at most, in both directions together.
        tell: Called with lines about the progress.

    Raises:
        PeerError: The other end was lost.
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
            arrivals, windows[count] = peer.burst(BurstOrder(direction, size_bytes, seconds, count))
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
