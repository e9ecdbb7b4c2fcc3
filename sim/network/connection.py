"""A connection over shared links, which sends messages in order within the limits of TCP's congestion window."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import simpy

from planner.cost.network import curve_rate_bps, jitter_delay_s, payload_bps
from planner.scenario.effects import NetworkEffects
from sim.kernel.events import Flow, Timer
from sim.network.routes import PathLatency, Route
from sim.network.send_buffer import SendBuffer
from sim.network.send_window import SendWindow
from sim.network.shared_links import SharedLinks
from sim.network.single_link import FairLink, FifoLink

# Two directions that start at the same instant would stay in step forever, each idle while the acknowledgements of both
# come back. That state is not stable (Zhang, Shenker and Clark, 1991): a difference of 10 µs, less than any between two
# real processes, leads to the same rates as one of 1 ms. So the direction that the plan uses first hears of
# acknowledgements later, by this share of the latency of the way back.
_LATER_SHARE = 1e-4

# A link, or a set of links, that several flows share.
SharedLink = FairLink | FifoLink | SharedLinks


def _ignore(departed_s: float) -> None:
    """Do nothing when bytes depart which are not the last ones of their message."""


@dataclass(eq=False, slots=True)
class Message:
    """A message on a shared line.

    Attributes:
        number: Index of the message in the step's graph; -1 for messages outside of the graph.
        size_bytes: Size of the payload, bytes.
        ready_s: Time at which the sender has the message ready, seconds; may be later than the current time.
        posted_s: Time at which the receiver posted the receive, seconds; minus infinity if senders do not wait for
            receives.
        departed_s: Time at which the last bit left the sender, seconds; nan until then.
        arrived_s: Arrival at the receiver, seconds; nan until the message has departed; may be later than the current
            time.
        flows: Number of equal parts in which the devices of a tensor-parallel group send the message at once.
    """

    step: int
    number: int
    size_bytes: int
    ready_s: float
    posted_s: float = -math.inf
    departed_s: float = math.nan
    arrived_s: float = math.nan
    flows: int = 1


@dataclass(eq=False)
class Connection:
    """One direction between two devices, over links that it shares with others.

    Args:
        link: The shared link, or set of links, that carries the connection's flows.
        back: Latency from the target to the source.
        way_back: The link behind whose bytes acknowledgements wait; None if they do not wait.
        delivered: Queue to which each message is appended when it departs.
        is_first: Whether the plan uses this direction before the one back.
    """

    _environment: simpy.Environment
    _route: Route
    _link: SharedLink
    _effects: NetworkEffects
    _back: PathLatency
    _way_back: FifoLink | None
    _delivered: deque[Message]
    _is_first: bool = False

    def __post_init__(self) -> None:
        self._queue: deque[Message] = deque()
        # Messages all of whose bytes were given to the link, and that have not departed.
        self._sent: deque[Message] = deque()
        self._window: SendWindow | None = None
        self._buffer: SendBuffer | None = None
        self._window_bytes = math.inf
        effects, route = self._effects, self._route
        self._ceiling_bps = route.ceiling_bps
        if effects.cold_start:
            # If packets are lost, the route's ceiling is already the rate that windows allow in the long run.
            if not route.loses_packets:
                self._window_bytes = effects.window_bytes * route.connections
                self._ceiling_bps = math.inf
            first_bytes = min(effects.initial_window_bytes * route.connections, self._window_bytes)
            is_waiting = not (self._back.is_none and route.latency.is_none)
            if self._way_back is None or not isinstance(self._link, FifoLink) or not is_waiting:
                self._window = SendWindow(first_bytes, self._window_bytes, effects.idle_s)
            else:
                self._buffer = SendBuffer(
                    first_bytes, self._window_bytes, self._timeout_s, self._way_back, self._back.at_s
                )
        # Bytes of the first message of the queue that were not given to the link yet.
        self._left_bytes = 0.0
        self._arrived_s = 0.0
        # Since when and until when the rate that was looked up last holds, seconds, and the rate, bits per second.
        self._rate = (0.0, 0.0, 0.0)

    def send(self, message: Message) -> None:
        """Queue a message; it departs when it is ready and all earlier messages have departed."""
        self._queue.append(message)
        if len(self._queue) == 1:
            self._await_start()

    # The methods below are callbacks in place of one SimPy process per connection; with processes, runs over shared
    # links took 25 % longer.

    def _await_start(self) -> None:
        """Wait until the first message of the queue can leave, and transmit it."""
        start_s = self._first_start_s()
        if self._buffer is not None and start_s > self._environment.now:
            # How many bytes then are under way in the other direction is not known yet.
            Timer(self._environment, start_s, self._start)
        else:
            self._start(start_s=start_s)

    def _first_start_s(self) -> float:
        """Return when the first message of the queue can leave, seconds."""
        message = self._queue[0]
        self._left_bytes = float(message.size_bytes)
        noticed_s = message.posted_s
        if noticed_s > -math.inf:
            noticed_s += self._back.at_s(noticed_s)
        return max(self._environment.now, message.ready_s, noticed_s)

    def _round_trip_s(self, time_s: float) -> float:
        return self._route.latency_at_s(time_s) + self._back.at_s(time_s)

    def _timeout_s(self, time_s: float) -> float:
        """Return the smallest retransmission timeout at a time, seconds."""
        return self._effects.idle_s + self._round_trip_s(time_s)

    def _start(self, _: Timer | None = None, start_s: float = 0.0) -> None:
        """Begin to send a message."""
        start_s = max(start_s, self._environment.now)
        if self._buffer is not None:
            self._buffer.begin(start_s, self._queue[0].size_bytes)
            self._send_on(self._buffer)
            return
        if self._window is not None:
            payload_bps = self._payload_bps(start_s)
            start_s += self._window.waiting_s(start_s, self._left_bytes, payload_bps, self._round_trip_s(start_s))
        if start_s > self._environment.now:
            Timer(self._environment, start_s, self._transmit_window)
        else:
            self._transmit_window()

    def _send_on(self, buffer: SendBuffer) -> None:
        """Send as much of the messages as there is room for; the rest waits for acknowledgements."""
        now_s = self._environment.now
        while self._send_some(buffer):
            self._sent.append(self._queue.popleft())
            if not self._queue:
                return
            start_s = self._first_start_s()
            if start_s > now_s:
                Timer(self._environment, start_s, self._start)
                return
            buffer.begin(now_s, self._queue[0].size_bytes)

    def _send_some(self, buffer: SendBuffer) -> bool:
        """Send what there is room for of the first message; return whether that was all of it."""
        assert isinstance(self._link, FifoLink)
        sent_bytes = self._with_remainder(buffer.room_bytes(self._environment.now))
        self._left_bytes -= sent_bytes
        is_last = not self._left_bytes
        if sent_bytes or is_last:
            depart = self._depart_last if is_last else _ignore
            starts_s, departs_s = self._link.start(self._flow(sent_bytes, self._queue[0], depart))
            if departs_s == math.inf:
                # The link carries nothing any more: the run stalls.
                return False
            latency_s = self._route.latency_at_s(departs_s)
            buffer.send(sent_bytes, starts_s + latency_s, departs_s + latency_s)
        if is_last:
            return True
        arrived_s = buffer.await_room_s()
        if arrived_s > self._environment.now:
            # All bytes before the acknowledgement on its way are known when it sets out.
            Timer(self._environment, arrived_s, lambda _: self._await_acknowledgement(buffer, arrived_s))
        else:
            self._await_acknowledgement(buffer, arrived_s)
        return False

    def _await_acknowledgement(self, buffer: SendBuffer, arrived_s: float) -> None:
        """Send on when the acknowledgement of bytes that arrived at ``arrived_s`` is here."""

        def send_on(_: Timer) -> None:
            buffer.make_room(arrived_s)
            self._send_on(buffer)

        later_s = _LATER_SHARE * self._back.at_s(arrived_s) if self._is_first else 0.0
        acknowledged_s = max(self._environment.now, buffer.acknowledged_s(arrived_s) + later_s)
        Timer(self._environment, acknowledged_s, send_on)

    def _depart_last(self, departed_s: float) -> None:
        assert self._buffer is not None
        self._buffer.left(departed_s)
        self._deliver(self._sent.popleft(), departed_s)

    def _transmit_window(self, _: Timer | None = None) -> None:
        """Transmit the next bytes of the message, at most one window, since links queue no more at a time."""
        sent_bytes = self._with_remainder(self._window_bytes)
        self._left_bytes -= sent_bytes
        self._link.start(self._flow(sent_bytes, self._queue[0], self._depart))

    def _with_remainder(self, room_bytes: float) -> float:
        """Return how much of the message there is room for, with a remainder of half a byte, which is rounding."""
        return room_bytes if room_bytes < self._left_bytes - 0.5 else self._left_bytes

    def _depart(self, departed_s: float) -> None:
        """Transmit the next window of the message, or deliver it and go on with the next message."""
        if self._left_bytes:
            self._transmit_window()
            return
        self._deliver(self._queue.popleft(), departed_s)
        if self._queue:
            self._await_start()

    def _deliver(self, message: Message, departed_s: float) -> None:
        """Note when a message departed, and when it arrives."""
        jitter_s = jitter_delay_s(self._route.jitter_s, message.size_bytes)
        latency_s = self._route.latency_at_s(departed_s) + jitter_s + self._effects.handover_s
        # Messages arrive in order, also where the latency falls or a smaller message follows.
        self._arrived_s = max(self._arrived_s, departed_s + latency_s)
        message.departed_s, message.arrived_s = departed_s, self._arrived_s
        self._delivered.append(message)

    def _flow(self, sent_bytes: float, message: Message, depart: Callable[[float], None]) -> Flow:
        """Return a flow of ``sent_bytes`` of a message; links' size curves may limit the flow's rate."""
        effects, route = self._effects, self._route
        ceiling_bps = self._ceiling_bps
        for curve in route.size_curves if message.size_bytes else ():
            of_curve_bps = curve_rate_bps(curve, message.size_bytes, message.flows)
            rate_bps = effects.share * of_curve_bps / effects.payload_efficiency
            ceiling_bps = min(ceiling_bps, rate_bps / route.connections)
        bits = 8 * sent_bytes / effects.payload_efficiency
        return Flow(route.link_names, bits, route.connections, ceiling_bps, depart)

    def _payload_bps(self, time_s: float) -> float:
        """Return the payload rate of the unshared path at a time, bits per second."""
        since_s, until_s, rate_bps = self._rate
        if since_s <= time_s < until_s:
            return rate_bps
        rates = [
            (link.bandwidth_bps, math.inf) if link.trace is None else link.trace.rate_until(time_s)
            for link in self._route.path
        ]
        rate_bps = payload_bps(self._effects, min(rate_bps for rate_bps, _ in rates))
        self._rate = time_s, min(until_s for _, until_s in rates), rate_bps
        return rate_bps
