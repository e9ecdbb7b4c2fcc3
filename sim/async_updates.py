"""Training without a global barrier: pipelines send updates when they have them and apply what arrives.

An update's staleness counts what it did not know of: the steps that its receiver had finished when the update
arrived, less those whose updates had reached its sender when the sender began the first step that it sums.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from planner.cost.synchronisation import UpdateEdge
from planner.events.event import UPDATE_ACTION, Event, EventKind
from planner.plan.plan import Synchronisation
from sim.network.connection import Message


class Updates:
    """The updates of a run.

    Args:
        edges: Who sends to whom.
        synchronisation: How often, and how far anybody may run ahead.
        actors: Device names.
    """

    def __init__(self, edges: Sequence[UpdateEdge], synchronisation: Synchronisation, actors: Sequence[str]) -> None:
        number = {name: actor for actor, name in enumerate(actors)}
        self._edges = edges
        self._every = synchronisation.interval_steps
        self._bound = synchronisation.staleness_bound
        self._actors = actors
        self._sender = [number[edge.sender] for edge in edges]
        self._receiver = [number[edge.receiver] for edge in edges]
        self._bounded: list[tuple[int, int]] = []
        # Arrivals per edge, one per exchange, and when each actor began and finished each of its steps.
        self._arrivals_s: list[list[float]] = [[] for _ in edges]
        self._begun_s: defaultdict[int, list[float]] = defaultdict(list)
        self._ended_s: defaultdict[int, list[float]] = defaultdict(list)

    def begin(self, actor: int, step: int, now_s: float) -> float | None:
        """Let an actor that could begin its next step at a time do so; return when it does, None if it has to wait."""
        may_begin_s = self.may_begin_s(actor, step)
        if may_begin_s is None:
            self._bounded.append((step, actor))
            return None
        begins_s = max(now_s, may_begin_s)
        self._begun_s[actor].append(begins_s)
        return begins_s

    @property
    def waiting(self) -> list[int]:
        """Actors that wait for updates."""
        return [actor for _, actor in self._bounded]

    def finish(self, actor: int, now_s: float) -> list[tuple[int, Message]]:
        """Take note that an actor has finished its step; return what it sends, with the number of the edge."""
        ended_s = self._ended_s[actor]
        ended_s.append(now_s)
        step = len(ended_s) - 1
        if (step + 1) % self._every:
            return []
        own = (edge for edge, sender in enumerate(self._sender) if sender == actor)
        return [(edge, Message(step, -1 - edge, self._edges[edge].size_bytes, now_s)) for edge in own]

    def sent(self, parcel: Message, departed_s: float) -> Event:
        """Return the row for sending an update."""
        edge = self._edges[-1 - parcel.message]
        place = (edge.sender, edge.receiver, edge.pipelines[0], -1, -1, parcel.step)
        return Event(EventKind.SEND, *place, UPDATE_ACTION, parcel.ready_s, departed_s, edge.size_bytes)

    def arrive(self, parcel: Message, arrived_s: float) -> list[tuple[int, int]]:
        """Take note of an update's arrival; return who waited for such a one, after the step that it may begin."""
        edge = -1 - parcel.message
        self._arrivals_s[edge].append(arrived_s)
        released = [(step, actor) for step, actor in self._bounded if actor == self._receiver[edge]]
        self._bounded = [each for each in self._bounded if each not in released]
        return released

    def may_begin_s(self, actor: int, step: int) -> float | None:
        """Return when a step may begin, seconds; None if that is not known yet, 0 if nothing bounds it."""
        if self._bound is None:
            return 0.0
        exchanges = max(0, (step - self._bound) // self._every)
        latest_s = 0.0
        for edge, receiver in enumerate(self._receiver):
            if receiver == actor and exchanges:
                if len(self._arrivals_s[edge]) < exchanges:
                    return None
                latest_s = max(latest_s, self._arrivals_s[edge][exchanges - 1])
        return latest_s

    def events(self) -> list[Event]:
        """Return a row for each update that was applied, with its staleness."""
        return [self._event(edge, number) for edge in range(len(self._edges)) for number in range(self._count(edge))]

    def _count(self, edge: int) -> int:
        return len(self._arrivals_s[edge])

    def _event(self, edge: int, number: int) -> Event:
        sender, receiver = self._sender[edge], self._receiver[edge]
        arrived_s = self._arrivals_s[edge][number]
        known = self._known_steps(receiver, sender, self._begun_s[sender][number * self._every])
        staleness = bisect_right(self._ended_s[receiver], arrived_s) - known
        step = (number + 1) * self._every - 1
        place = (self._actors[receiver], self._actors[sender], self._edges[edge].pipelines[1], self._edges[edge].stage)
        size_bytes = self._edges[edge].size_bytes
        return Event(EventKind.UPDATE, *place, -1, step, "", arrived_s, arrived_s, size_bytes, staleness)

    def _known_steps(self, of: int, to: int, now_s: float) -> int:
        """Steps of one actor whose updates had reached another at a time: the fewest over what both hold."""
        backward = [edge for edge in range(len(self._edges)) if self._sender[edge] == of and self._receiver[edge] == to]
        return min((self._every * bisect_right(self._arrivals_s[edge], now_s) for edge in backward), default=0)
