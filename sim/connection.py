"""A line over shared links: messages leave in order, one at a time, and arrive after the latency."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import simpy

from planner.effects import NetworkEffects
from planner.packets import jitter_delay_s
from sim.alarm import Alarm
from sim.flow import Flow
from sim.routes import Route

# More than take any window down to its first size.
_MOST_HALVINGS = 64


class Carrier(Protocol):
    """Shared links that messages are started on."""

    def start(self, flow: Flow) -> None:
        """Let a message share the links from now on."""


@dataclass(eq=False, slots=True)
class Parcel:
    """A message between its handing over and its arrival.

    Attributes:
        step: Of training.
        message: Its number in the step's graph.
        size_bytes: Payload.
        ready_s: When it is handed over; may lie ahead of the clock.
        posted_s: When the receiver posted its receive; minus infinity if that does not matter.
    """

    step: int
    message: int
    size_bytes: int
    ready_s: float
    posted_s: float = -math.inf


class Connection:
    """One direction between two devices.

    Args:
        environment: The clock.
        route: Its links.
        carrier: What shares them.
        effects: What TCP does.
        back_s: Latency of the way back, seconds.
        deliver: Called with each parcel, and the times of its departure and arrival, when it has departed.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        route: Route,
        carrier: Carrier,
        effects: NetworkEffects,
        back_s: float,
        deliver: Callable[[Parcel, float, float], None],
    ) -> None:
        self._environment = environment
        self._route = route
        self._carrier = carrier
        self._effects = effects
        self._back_s = back_s
        self._deliver = deliver
        self._latency_sways = any(link.trace is not None and link.trace.latency_s is not None for link in route.path)
        self._latency_s = sum(link.latency_s for link in route.path)
        self._jitter_s = sum(link.jitter_s for link in route.path)
        self._curves = [link.size_curve for link in route.path if link.size_curve is not None]
        self._links = tuple(link.name for link in route.binding)
        self._round_trip_s = self._latency_s + back_s
        self._window_bytes = self._initial_bytes = effects.initial_window_bytes * route.connections
        self._queue: deque[Parcel] = deque()
        self._busy = False
        self._departed_s = -math.inf
        self._arrived_s = 0.0

    def send(self, parcel: Parcel) -> None:
        """Hand a parcel over; it leaves when those before it have."""
        self._queue.append(parcel)
        if not self._busy:
            self._busy = True
            self._next()

    def _next(self) -> None:
        """Start the first parcel in the queue when all that it waits for is there."""
        parcel = self._queue[0]
        now_s = self._environment.now
        start_s = max(now_s, parcel.ready_s, parcel.posted_s + self._back_s)
        if self._effects.cold_start:
            self._cool(start_s - self._departed_s)
            start_s += self._warm(parcel.size_bytes)
        if start_s > now_s:
            Alarm(self._environment, start_s, self._start)
        else:
            self._start()

    def _start(self, _: Alarm | None = None) -> None:
        size_bytes = self._queue[0].size_bytes
        bits = 8 * size_bytes / self._effects.payload_efficiency
        ceiling_bps = self._ceiling_bps(size_bytes)
        self._carrier.start(Flow(self._links, bits, self._route.connections, ceiling_bps, self._departed))

    def _ceiling_bps(self, size_bytes: int) -> float:
        """Return the bits on the wire per second that a message reaches by itself at most, of each connection."""
        ceiling_bps = self._route.ceiling_bps
        for curve in self._curves if size_bytes else ():
            rate_bps = self._effects.share * curve.rate_bps(size_bytes) / self._effects.payload_efficiency
            ceiling_bps = min(ceiling_bps, rate_bps / self._route.connections)
        return ceiling_bps

    def _departed(self, now_s: float) -> None:
        parcel = self._queue.popleft()
        self._departed_s = now_s
        latency_s = self._latency_s
        if self._latency_sways:
            latency_s = sum(link.latency_at_s(now_s) for link in self._route.path)
        latency_s += jitter_delay_s(self._jitter_s, parcel.size_bytes)
        # Nothing overtakes, also where the latency falls or a smaller message follows.
        self._arrived_s = max(self._arrived_s, now_s + latency_s)
        if self._queue:
            self._next()
        else:
            self._busy = False
        self._deliver(parcel, now_s, self._arrived_s)

    def _cool(self, idle_s: float) -> None:
        """Halve the window for each retransmission timeout that the connection was idle."""
        timeout_s = self._effects.idle_s + self._round_trip_s
        if idle_s >= timeout_s:
            halvings = math.floor(min(idle_s / timeout_s, _MOST_HALVINGS)) if timeout_s else _MOST_HALVINGS
            self._window_bytes = max(self._initial_bytes, self._window_bytes / 2**halvings)

    def _warm(self, size_bytes: int) -> float:
        """Let the window grow by a message; return what slow start costs it, seconds.

        Round trips with a small window, less what they carry: the window doubles every round trip until it fills the
        path or the message is through (RFC 5681); the message is taken to go at full rate from then on.
        """
        link_bps = self._effects.share * min(link.bandwidth_bps for link in self._route.path)
        wire_bps = min(link_bps, self._route.connections * self._ceiling_bps(size_bytes))
        rate_bps = self._effects.payload_efficiency * wire_bps
        path_bytes = rate_bps * self._round_trip_s / 8
        full_bytes = min(path_bytes, size_bytes)
        first_bytes = self._window_bytes
        # A sender that fills the path has as much again in the buffer before it.
        self._window_bytes = max(first_bytes, min(first_bytes + size_bytes, 2 * path_bytes))
        if full_bytes <= first_bytes:
            return 0.0
        rounds = math.ceil(math.log2(full_bytes / first_bytes + 1) - 1e-12)
        carried_bytes = min(first_bytes * (2**rounds - 1), size_bytes)
        return float(max(0.0, rounds * self._round_trip_s - 8 * carried_bytes / rate_bps))
