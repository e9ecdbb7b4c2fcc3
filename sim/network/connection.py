"""A connection over shared links, which sends messages in order within the limits of TCP's congestion window."""

import math
from collections import deque
from dataclasses import dataclass

import simpy

from planner.cost.network import curve_rate_bps, jitter_delay_s, payload_bps
from planner.scenario.effects import NetworkEffects
from sim.kernel.events import Flow, Timer
from sim.network.routes import Route
from sim.network.shared_links import SharedLinks
from sim.network.single_link import FairLink, FifoLink

# Number of parts of a window that are acknowledged one by one, since acknowledgements arrive while a window is sent.
_PARTS = 16

# Halvings after which every window has its initial size.
_MOST_HALVINGS = 64


class SendWindow:
    """The congestion window of a TCP sender: the sum over all parallel connections of one direction.

    At most a window of bytes is unacknowledged; bytes are acknowledged one round trip after they left. In slow start
    each acknowledged byte increases the window by one byte (RFC 5681), as long as the sender fills the window. While
    the sender is idle, the window halves at every retransmission timeout (RFC 2861, as Linux implements it).

    Args:
        initial_bytes: Initial window, bytes.
        most_bytes: Largest window, given by the size of the connections' buffers, bytes.
        round_trip_s: Latency there and back, seconds.
        timeout_s: Smallest retransmission timeout, excluding the round trip, seconds.
        back_s: Part of ``round_trip_s`` on the way back, seconds.
    """

    def __init__(
        self, initial_bytes: float, most_bytes: float, round_trip_s: float, timeout_s: float, back_s: float = 0.0
    ) -> None:
        self._back_s = back_s
        self._initial_bytes = initial_bytes
        self._most_bytes = most_bytes
        self._round_trip_s = round_trip_s
        self._timeout_s = timeout_s + round_trip_s
        self._window_bytes = initial_bytes
        self._idle_since_s = 0.0
        # For each part: time of the acknowledgement in seconds, size in bytes.
        self._unacknowledged: deque[tuple[float, float]] = deque()
        self._in_flight_bytes = 0.0
        # Most bytes in flight since the latest message began, with those that wait before the path.
        self._most_in_flight_bytes = 0.0

    @property
    def size_bytes(self) -> float:
        """Size of the window, bytes."""
        return min(self._window_bytes, self._most_bytes)

    def waiting_s(self, now_s: float, size_bytes: float, rate_bps: float, clear_s: float = 0.0) -> float:
        """Send a message; return the delay that the window adds to the transmission time on the path, seconds.

        Args:
            now_s: Earliest start of the message, not before the start of the previous message, seconds.
            size_bytes: Size of the message, bytes.
            rate_bps: Payload rate of the path, bits per second.
            clear_s: Time before which the bytes of the other direction leave no room for acknowledgements, seconds.
        """
        if not size_bytes or not self._round_trip_s or not rate_bps:
            return 0.0
        self._halve_if_idle(now_s)
        self._acknowledge(now_s)
        clock_s, left_bytes, self._most_in_flight_bytes = now_s, float(size_bytes), 0.0
        while left_bytes > 0:
            self._acknowledge(clock_s)
            open_bytes = self.size_bytes
            self._most_in_flight_bytes = max(
                self._most_in_flight_bytes, min(open_bytes, self._in_flight_bytes + left_bytes)
            )
            part_bytes = min(left_bytes, open_bytes / _PARTS)
            # Rounding must not delay a part.
            if open_bytes - self._in_flight_bytes < part_bytes * (1 - 1e-9) and self._unacknowledged:
                clock_s = max(clock_s, self._unacknowledged[0][0])
                continue
            part_s = 8 * part_bytes / rate_bps
            clock_s += part_s
            # Bytes are acknowledged one by one; the part counts as acknowledged halfway through its bytes.
            self._in_flight_bytes += part_bytes
            acknowledged_s = max(clock_s - part_s / 2 + self._round_trip_s, clear_s + self._back_s)
            self._unacknowledged.append((acknowledged_s, part_bytes))
            left_bytes -= part_bytes
        self._idle_since_s = clock_s
        return max(0.0, clock_s - now_s - 8 * size_bytes / rate_bps)

    def _acknowledge(self, now_s: float) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= now_s:
            _, part_bytes = self._unacknowledged.popleft()
            # Linux grows a window to at most twice the bytes in flight.
            grown_bytes = min(self._window_bytes + part_bytes, 2 * self._most_in_flight_bytes)
            self._window_bytes = max(self._window_bytes, grown_bytes)
            self._in_flight_bytes -= part_bytes
        if not self._unacknowledged:
            self._in_flight_bytes = 0.0

    def _halve_if_idle(self, now_s: float) -> None:
        idle_s = now_s - self._idle_since_s
        if idle_s < self._timeout_s:
            return
        # By now all earlier bytes have been acknowledged, and have increased the window.
        self._acknowledge(now_s)
        halvings = math.floor(min(idle_s / self._timeout_s, _MOST_HALVINGS))
        self._window_bytes = max(self._initial_bytes, self._window_bytes / 2**halvings)


# A link, or a set of links, that several flows share.
SharedLink = FairLink | FifoLink | SharedLinks


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
        back_s: Latency from the target to the source, seconds.
        delivered: Queue to which each message is appended when it departs.

    Attributes:
        other_way: The connection from the target to the source, behind whose bytes acknowledgements wait; None if there
            is none.
    """

    _environment: simpy.Environment
    _route: Route
    _link: SharedLink
    _effects: NetworkEffects
    _back_s: float
    _delivered: deque[Message]

    def __post_init__(self) -> None:
        self.other_way: Connection | None = None
        self._queue: deque[Message] = deque()
        self._window = None
        self._window_bytes = math.inf
        effects, route = self._effects, self._route
        self._ceiling_bps = route.ceiling_bps
        if effects.cold_start:
            # If packets are lost, the route's ceiling is already the rate that windows allow in the long run.
            if not route.loses_packets:
                self._window_bytes = effects.window_bytes * route.connections
                self._ceiling_bps = math.inf
            first_bytes = min(effects.initial_window_bytes * route.connections, self._window_bytes)
            round_trip_s = route.latency_s + self._back_s
            self._window = SendWindow(first_bytes, self._window_bytes, round_trip_s, effects.idle_s, self._back_s)
        self._left_bytes = self._part_bytes = 0.0
        self._sent_bytes = 0.0
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
        message = self._queue[0]
        self._left_bytes = float(message.size_bytes)
        start_s = max(self._environment.now, message.ready_s, message.posted_s + self._back_s)
        if self.other_way is not None and start_s > self._environment.now:
            # How many bytes then are under way in the other direction is not known yet.
            Timer(self._environment, start_s, self._await_window)
        else:
            self._await_window(start_s=start_s)

    def _await_window(self, _: Timer | None = None, start_s: float = 0.0) -> None:
        """Wait until the window lets the next part of the message through, and transmit it.

        The part is the rest of the message or, while acknowledgements wait for bytes of the other direction, one
        window, since the wait changes with these bytes.
        """
        start_s = max(start_s, self._environment.now)
        queue_s = self.other_way.queue_s(start_s) if self.other_way is not None else 0.0
        self._part_bytes = self._left_bytes
        if self._window is not None:
            if queue_s:
                self._part_bytes = min(self._left_bytes, self._window.size_bytes)
            rate_bps = self._payload_bps(start_s)
            clear_s = start_s + queue_s if queue_s else 0.0
            start_s += self._window.waiting_s(start_s, self._part_bytes, rate_bps, clear_s)
        if start_s > self._environment.now:
            Timer(self._environment, start_s, self._transmit_window)
        else:
            self._transmit_window()

    def _transmit_window(self, _: Timer | None = None) -> None:
        """Transmit the next bytes of the part, at most one window, since links queue no more at a time."""
        self._sent_bytes = min(self._part_bytes, self._window_bytes)
        self._part_bytes -= self._sent_bytes
        self._left_bytes -= self._sent_bytes
        self._link.start(self._flow(self._sent_bytes, self._queue[0]))

    def queue_s(self, now_s: float) -> float:
        """Return how long a packet that this connection sends at ``now_s`` waits for earlier bytes, seconds.

        Bytes that have departed were followed by others of the same message, since a window of bytes is under way.
        """
        if not isinstance(self._link, FifoLink) or not self._queue:
            return 0.0
        queued_s, rate_bps = self._link.backlog_s(now_s), self._payload_bps(now_s)
        if not queued_s or not self._left_bytes or not rate_bps:
            return queued_s
        departed_bytes = max(0.0, self._sent_bytes - queued_s * rate_bps / 8)
        return queued_s + 8 * min(departed_bytes, self._left_bytes) / rate_bps

    def _depart(self, departed_s: float) -> None:
        """Transmit the next window of the message, or deliver it and go on with the next message."""
        # A remainder of at most half a byte comes from rounding.
        if self._left_bytes > 0.5:
            if self._part_bytes > 0.5:
                self._transmit_window()
            else:
                self._await_window()
            return
        message, route = self._queue.popleft(), self._route
        jitter_s = jitter_delay_s(route.jitter_s, message.size_bytes)
        latency_s = route.latency_at_s(departed_s) + jitter_s + self._effects.handover_s
        # Messages arrive in order, also where the latency falls or a smaller message follows.
        self._arrived_s = max(self._arrived_s, departed_s + latency_s)
        message.departed_s, message.arrived_s = departed_s, self._arrived_s
        self._delivered.append(message)
        if self._queue:
            self._await_start()

    def _flow(self, sent_bytes: float, message: Message) -> Flow:
        """Return a flow of ``sent_bytes`` of a message; links' size curves may limit the flow's rate."""
        effects, route = self._effects, self._route
        ceiling_bps = self._ceiling_bps
        for curve in route.size_curves if message.size_bytes else ():
            of_curve_bps = curve_rate_bps(curve, message.size_bytes, message.flows)
            rate_bps = effects.share * of_curve_bps / effects.payload_efficiency
            ceiling_bps = min(ceiling_bps, rate_bps / route.connections)
        bits = 8 * sent_bytes / effects.payload_efficiency
        return Flow(route.link_names, bits, route.connections, ceiling_bps, self._depart)

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
