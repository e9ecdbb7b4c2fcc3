"""Messages with updates between pipelines: sent without waiting, received ahead of time, and recorded."""

import struct
import threading
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.core.failures import PeerLostError
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import update_tag
from planner.cost.synchronisation import UpdateEdge
from planner.events.event import UPDATE_ACTION, Event, EventKind
from planner.plan.exchange_steps import Exchanges
from planner.plan.outer_step import FragmentExchanges

# Header of an update: the number of the receiver's first step whose update had not reached the sender when it began the
# first step of the update.
HEADER = struct.Struct("q")

# Number of receives posted ahead: while one update arrives, gloo's notice of the next receive travels to the sender.
_POSTED_UPDATES = 2


@dataclass(frozen=True, slots=True)
class Update:
    """Gradients or parameters that another pipeline has sent.

    Attributes:
        edge: The sender, the receiver and the layers.
        exchange: Number of the exchange between the pipelines, from 0.
        known: The number in the `HEADER`.
        payload: The bytes after the header, a one-dimensional uint8 tensor.
    """

    edge: UpdateEdge
    exchange: int
    known: int
    payload: torch.Tensor
    arrived_s: float

    @property
    def values(self) -> torch.Tensor:
        """The payload as a one-dimensional float32 tensor of the layers' gradients or parameters."""
        return self.payload.view(torch.float32)


@dataclass(eq=False)
class IncomingUpdates:
    """The updates from one rank of another pipeline, received in order by background threads.

    The threads that receive also post the next receives, so that a fast sender need not wait for a slow receiver.
    Methods raise `PeerLostError` if the sender is lost.

    Args:
        edge: The sender, the receiver (this rank) and the layers.
        post_round: Posts the receive of an update by its number; calls the given function on arrival.
        noticed: Called with the edge after an arrival, in a thread that receives; not if the sender is lost.
    """

    edge: UpdateEdge
    _post_round: Callable[[int, Callable[[RecvHandle], None]], RecvHandle]
    _noticed: Callable[[UpdateEdge], None]

    def __post_init__(self) -> None:
        self._expected = 0
        self._next = 0
        self._posted: deque[RecvHandle] = deque()
        self._ready: deque[RecvHandle] = deque()
        self._arrived_s: list[float] = []
        self._taken = 0
        self._lost: PeerLostError | None = None
        self._changed = threading.Condition()

    def expect(self, count: int) -> None:
        """Post the receives of the first ``count`` updates, which are certain to come, `_POSTED_UPDATES` at a time."""
        with self._changed:
            self._expected = max(self._expected, count)
            self._post()

    @property
    def arrived(self) -> int:
        """Number of updates that have arrived."""
        return len(self._arrived_s)

    def wait_for(self, count: int) -> float:
        """Wait for the first ``count`` updates; return the run second at which the last of them arrived."""
        with self._changed:
            while self.arrived < count:
                if self._lost is not None:
                    raise self._lost
                self._changed.wait()
            return self._arrived_s[count - 1] if count else float("-inf")

    def take(self, stop: int | None) -> list[Update]:
        """Remove and return the arrived updates with numbers below ``stop``, or all of them if it is None."""
        updates = []
        with self._changed:
            while self._ready and (stop is None or self._taken < stop):
                handle = self._ready.popleft()
                payload = handle.wait()
                (known,) = HEADER.unpack(payload[: HEADER.size].numpy().tobytes())
                # The bytes after the header need not be aligned to 4 bytes; their copy is.
                rest = payload[HEADER.size :].clone()
                updates.append(Update(self.edge, self._taken, known, rest, handle.arrived_s))
                self._taken += 1
        return updates

    def _post(self) -> None:
        while self._next < self._expected and len(self._posted) < _POSTED_UPDATES:
            self._posted.append(self._post_round(self._next, self._on_arrival))
            self._next += 1

    def _on_arrival(self, handle: RecvHandle) -> None:
        """Accept updates in the order of their numbers, in which the receiving threads need not wake up."""
        with self._changed:
            try:
                while self._posted and self._posted[0].is_complete:
                    first = self._posted.popleft()
                    self._ready.append(first)
                    self._arrived_s.append(first.arrived_s)
                    self._post()
            except PeerLostError as error:
                self._lost = error
            self._changed.notify_all()
        if not handle.lost:
            self._noticed(self.edge)


class UpdateMessages:
    """The updates that one rank sends to other pipelines from a step on, and those that it receives.

    The staleness of updates is that of `sim.updates.async_updates`.

    Args:
        edges: Every pair of devices between which updates are sent, with the layers.
        exchanges: After which steps updates are sent, by fragment of the model.
        first_step: The first step with these exchanges.
        last_step: The last step of the run.
        noticed: That of `IncomingUpdates`.
    """

    def __init__(
        self,
        device: str,
        edges: Sequence[UpdateEdge],
        exchanges: Callable[[int], Exchanges | FragmentExchanges],
        first_step: int,
        last_step: int,
        transport: Transport,
        clock: RunClock,
        recorder: EventRecorder,
        noticed: Callable[[UpdateEdge], None] = lambda edge: None,
    ) -> None:
        self._exchanges = exchanges
        self._first, self._last = first_step, last_step
        self._transport = transport
        self._clock = clock
        self._recorder = recorder
        self.outgoing = [edge for edge in edges if edge.sender == device]
        self.incoming = [
            IncomingUpdates(edge, partial(self._post, edge), noticed) for edge in edges if edge.receiver == device
        ]
        self._publish_last: Callable[[], None] = lambda: None
        # By fragment, device of another pipeline and number of the interval modulo 2: its first step whose update had
        # not arrived when the interval began. Means are sent in the next interval.
        self._known: dict[tuple[int, str, int], int] = {}
        self._ended_s: list[float] = []

    def hold_last(self, step: int) -> None:
        """If ``step`` is the last one, publish its rows only when `publish` is called."""
        if step == self._last:
            self._publish_last = self._recorder.hold(step)

    def publish(self) -> None:
        """Publish the rows of the last step, after all updates."""
        self._publish_last()

    def expect_before(self, step: int) -> None:
        """Post the receives of the updates of the steps before ``step``, a few at a time."""
        for each in self.incoming:
            each.expect(self._exchanges(each.edge.fragment).before(step))

    def wait_before(self, step: int) -> float:
        """Wait for the updates of the steps before ``step``; return the run second of the last arrival.

        It is minus infinity if there is none.
        """
        counts = [(each, self._exchanges(each.edge.fragment).before(step)) for each in self.incoming]
        return max((each.wait_for(count) for each, count in counts), default=float("-inf"))

    def note_arrivals(self, step: int) -> None:
        """Note what has arrived of each sender whose interval begins with ``step``, for the headers of messages."""
        arrived: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for each in self.incoming:
            fragment = each.edge.fragment
            if step == self._first or self._exchanges(fragment).follows(step - 1):
                arrived[fragment, each.edge.sender].append(each.arrived)
        for (fragment, sender), counts in arrived.items():
            exchanges = self._exchanges(fragment)
            self._known[fragment, sender, exchanges.before(step) % 2] = exchanges.end_of(min(counts))

    def end_step(self, now_s: float) -> None:
        """Note the run second at which a step has ended."""
        self._ended_s.append(now_s)

    def send(self, edge: UpdateEdge, step: int, values: torch.Tensor, now_s: float) -> None:
        """Send the update of the steps up to ``step``, without waiting."""
        exchanges = self._exchanges(edge.fragment)
        exchange = exchanges.before(step + 1) - 1
        known = self._known.get((edge.fragment, edge.receiver, exchange % 2), exchanges.end_of(0))
        header = torch.frombuffer(bytearray(HEADER.pack(known)), dtype=torch.uint8)
        payload = torch.cat([header, values.view(torch.uint8)])
        assert payload.numel() == HEADER.size + edge.size_bytes, (edge, payload.numel())
        place = (edge.sender, edge.receiver, edge.pipelines[0], -1, -1, step)

        def event(start_s: float, end_s: float) -> Event:
            return Event(EventKind.SEND, *place, UPDATE_ACTION, start_s, end_s, edge.size_bytes)

        departed = self._recorder.sending(self._last, event, now_s)
        tag = update_tag(exchange, edge.layers[0], of_means=edge.carries_means)
        self._transport.send(edge.receiver, tag, payload, now_s, departed)

    def log_applied(self, updates: Sequence[Update], now_s: float) -> None:
        """Record that updates have been applied."""
        for update in updates:
            edge, arrived_s = update.edge, update.arrived_s
            step = self._exchanges(edge.fragment).last_step(update.exchange)
            place = (edge.receiver, edge.sender, edge.pipelines[1], edge.stage, -1, step)
            staleness = self._first + bisect_right(self._ended_s, arrived_s) - update.known
            times_s = (arrived_s, max(now_s, arrived_s))
            self._recorder.log(Event(EventKind.UPDATE, *place, "", *times_s, edge.size_bytes, staleness))

    def _post(self, edge: UpdateEdge, exchange: int, arrived: Callable[[RecvHandle], None]) -> RecvHandle:
        tag = update_tag(exchange, edge.layers[0], of_means=edge.carries_means)
        return self._transport.post(edge.sender, tag, HEADER.size + edge.size_bytes, arrived)
