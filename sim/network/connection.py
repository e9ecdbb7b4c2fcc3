"""A line over shared links: messages leave in order, one at a time, and arrive after the latency."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import simpy

from planner.cost.network import jitter_delay_s, payload_bps
from planner.scenario.effects import NetworkEffects
from sim.kernel.timer import Timer
from sim.network.flow import Flow
from sim.network.routes import Route
from sim.network.tcp_window import SendWindow


class SharedLink(Protocol):
    """Shared links that messages are started on."""

    def start(self, flow: Flow) -> None:
        """Let a message share the links from now on."""


@dataclass(eq=False, slots=True)
class Message:
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
        carrier: SharedLink,
        effects: NetworkEffects,
        back_s: float,
        deliver: Callable[[Message, float, float], None],
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
        self._lossy = any(link.loss for link in route.path)
        self._window = None
        self._most_bytes = math.inf
        if effects.cold_start:
            # Where packets are lost, what windows let through in the long run is in the route's ceiling.
            self._most_bytes = math.inf if self._lossy else effects.window_bytes * route.connections
            first_bytes = min(effects.initial_window_bytes * route.connections, self._most_bytes)
            self._window = SendWindow(first_bytes, self._most_bytes, self._round_trip_s, effects.idle_s)
        self._left_bytes = 0.0
        self._queue: deque[Message] = deque()
        self._busy = False
        self._arrived_s = 0.0

    def send(self, parcel: Message) -> None:
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
        if self._window is not None:
            start_s += self._window.waiting_s(start_s, parcel.size_bytes, self._payload_bps(start_s))
        if start_s > now_s:
            Timer(self._environment, start_s, self._start)
        else:
            self._start()

    def _start(self, _: Timer | None = None) -> None:
        self._left_bytes = self._queue[0].size_bytes
        self._start_window()

    def _start_window(self) -> None:
        """Let as much of the first parcel go as a window holds at most: what is queued before links at a time."""
        window_bytes = min(self._left_bytes, self._most_bytes)
        self._left_bytes -= window_bytes
        bits = 8 * window_bytes / self._effects.payload_efficiency
        ceiling_bps = self._ceiling_bps(self._queue[0].size_bytes)
        self._carrier.start(Flow(self._links, bits, self._route.connections, ceiling_bps, self._window_departed))

    def _window_departed(self, now_s: float) -> None:
        # Half a byte is what rounding left.
        if self._left_bytes > 0.5:
            self._start_window()
        else:
            self._departed(now_s)

    def _ceiling_bps(self, size_bytes: int) -> float:
        """Return the bits on the wire per second that a message reaches by itself at most, of each connection."""
        ceiling_bps = math.inf if self._opens else self._route.ceiling_bps
        for curve in self._curves if size_bytes else ():
            rate_bps = self._effects.share * curve.rate_bps(size_bytes) / self._effects.payload_efficiency
            ceiling_bps = min(ceiling_bps, rate_bps / self._route.connections)
        return ceiling_bps

    @property
    def _opens(self) -> bool:
        """Whether what windows let through follows from how they open and close, and not from losses."""
        return self._window is not None and not self._lossy

    def _payload_bps(self, now_s: float) -> float:
        """Return what the path carries of payload if nothing else is on it, bits per second."""
        slowest_bps = min(
            link.bandwidth_bps if link.trace is None else float(link.trace.bandwidth_at(now_s))
            for link in self._route.path
        )
        return payload_bps(self._effects, slowest_bps)

    def _departed(self, now_s: float) -> None:
        parcel = self._queue.popleft()
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
