"""Training without a global barrier: pipelines send updates when they are ready, and apply the updates that arrive.

The staleness of an update is a - b. a is the number of steps that the receiver had finished when the update arrived. b
is the number of steps of the receiver whose updates had reached the sender when the sender began the first step that
the update sums.
"""

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from operator import attrgetter

from planner.cost.synchronisation import UpdateEdge
from planner.events.event import UPDATE_ACTION, Event, EventKind
from planner.plan.exchange_steps import Exchanges
from planner.plan.outer_step import FragmentExchanges, fragment_exchanges
from planner.plan.plan import Plan, Synchronisation
from sim.network.connection import Message


@dataclass(eq=False, slots=True, kw_only=True)
class UpdateMessage(Message):
    """A message that carries an update of the edge with index ``edge`` in `AsyncUpdates.edges`."""

    edge: int


class AsyncUpdates:
    """Updates that pipelines exchange during a run, and the steps that wait for them.

    With outer steps an update contains a pseudo-gradient, for which the step waits that takes the outer step. With
    reduce-scatter a device sends means when its own step has ended and all pseudo-gradients of its part have arrived.
    If settings, weights or pipelines change with an epoch, or it begins with an earlier step again, pipelines take all
    outer steps before that are under way, and other edges begin. Without outer steps the devices that exchange updates
    stay in all epochs; the other replicas of their stages may change.

    Args:
        synchronisation: That of the first epoch.
        steps: Number of steps of the run.

    Attributes:
        edges: Every pair of devices between which updates are sent.
    """

    def __init__(self, synchronisation: Synchronisation, steps: int) -> None:
        self.edges: tuple[UpdateEdge, ...] = ()
        # Events of updates before the present edges.
        self._earlier: list[Event] = []
        self._set_up: tuple[object, ...] = ()
        self._is_copied: Callable[[int], bool] = lambda step: False
        self._settles, self._settled_s = -1, defaultdict[str, float](float)
        self._all_at_once = Exchanges(synchronisation.interval_steps, 0, steps)
        self._fragments: Sequence[FragmentExchanges] = ()
        self._exchanges: list[Exchanges | FragmentExchanges] = []
        # Numbers of the edges with the same exchanges between two devices, by the exchanges' id, sender and receiver.
        self._between = defaultdict[tuple[int, str, str], list[int]](list)
        # Numbers of the edges by which pseudo-gradients come to a device, and of those by which it sends their means,
        # by the exchanges' id and the device.
        self._averaged = defaultdict[tuple[int, str], tuple[list[int], list[int]]](lambda: ([], []))
        # Seconds from the start of the run: arrivals of an edge's updates, starts and ends of a device's steps.
        self._arrivals_s: list[array[float]] = []
        self._begun_s = defaultdict[str, "array[float]"](_no_times)
        self._ended_s = defaultdict[str, "array[float]"](_no_times)
        # Departure of the last update between two devices; and of the last one of earlier epochs, whose network is
        # another object.
        self._departed_s: dict[tuple[str, str], float] = {}
        self._free_s: dict[tuple[str, str], float] = {}
        self._how = synchronisation
        self._actors: Sequence[str] = ()
        # Numbers of the edges by the actor that sends, and by the one that receives.
        self._outgoing: dict[int, list[int]] = {}
        self._incoming: dict[int, list[int]] = {}
        # Pairs (step, actor): the actor must not begin the step before further updates have arrived.
        self._bounded: list[tuple[int, int]] = []

    def _begin_part(self, step: int, edges: Sequence[UpdateEdge], how: Synchronisation) -> None:
        """Begin steps with other exchanges or pipelines, after the arrival of all earlier updates."""
        self._earlier = list(self.events())
        # The step before which they have arrived, and the second at which a device has received the last one.
        self._settles, self._settled_s = step, defaultdict[str, float](float)
        for edge, arrivals_s in zip(self.edges, self._arrivals_s, strict=True):
            self._settled_s[edge.receiver] = max((self._settled_s[edge.receiver], *arrivals_s[-1:]))
        self._fragments = fragment_exchanges(*how.exchange_settings, step, self._fragments)
        self.edges = tuple(edges)
        fragments = self._fragments if how.has_outer_step else [self._all_at_once]
        self._exchanges = [fragments[edge.fragment] for edge in edges]
        self._arrivals_s = [_no_times() for _ in edges]
        self._between.clear()
        self._averaged.clear()
        for number, edge in enumerate(self.edges):
            exchanges = id(self._exchanges[number])
            self._between[exchanges, edge.sender, edge.receiver].append(number)
            if edge.carries_means:
                self._averaged[exchanges, edge.sender][1].append(number)
            elif edge.part is not None:
                self._averaged[exchanges, edge.receiver][0].append(number)

    def begin_epoch(
        self,
        step: int,
        edges: Sequence[UpdateEdge],
        plan: Plan,
        actors: Sequence[str],
        ready_at_s: Callable[[str], float],
        is_copied: Callable[[int], bool],
    ) -> list[UpdateMessage]:
        """Take over the actors of an epoch; return updates that they send first.

        These have the sums of the steps since the last exchange, and are sent if the interval changes.

        Args:
            step: The first step of the epoch.
            edges: Every pair of devices between which the epoch's plan sends updates.
            plan: The plan of the epoch.
            actors: The name of each actor's device.
            ready_at_s: Returns the second at which a device begins the epoch.
            is_copied: Returns whether devices copy their state before a step. Before that they wait for the
                pseudo-gradients that are under way.
        """
        synchronisation = plan.synchronisation
        set_up = (plan.exchange_set_up, tuple(edges))
        goes_back = any(len(self._ended_s[name]) > step for name in actors)
        # Where devices have left, what was under way is lost.
        lacks = any(
            len(times) < each.before(step) for times, each in zip(self._arrivals_s, self._exchanges, strict=True)
        )
        anew = set_up != self._set_up or goes_back or lacks
        if not self.edges or (synchronisation.has_outer_step and anew):
            self._begin_part(step, edges, synchronisation)
        self._set_up = set_up
        for name in actors:
            for times_s in (self._begun_s[name], self._ended_s[name]):
                del times_s[step:]
                # A device that comes later has no times of the steps before.
                times_s.extend([ready_at_s(name)] * (step - len(times_s)))
        self._how, self._is_copied, self._bounded = synchronisation, is_copied, []
        number = {name: actor for actor, name in enumerate(actors)}
        self._actors = actors
        self._outgoing, self._incoming = defaultdict(list), defaultdict(list)
        for index in range(len(self.edges)):
            self._outgoing[number[self.edges[index].sender]].append(index)
            self._incoming[number[self.edges[index].receiver]].append(index)
        self._free_s = dict(self._departed_s)
        sent = self._all_at_once.before(step)
        self._all_at_once.change(step, synchronisation.interval_steps)
        if synchronisation.has_outer_step or self._all_at_once.before(step) == sent:
            return []
        return [self._message(number, step - 1, ready_at_s(edge.sender)) for number, edge in enumerate(self.edges)]

    def settled_s(self, device: str, step: int) -> float:
        """Return when a device has received the last update before a step with which other exchanges begin, or 0."""
        return self._settled_s[device] if step == self._settles else 0.0

    @property
    def waiting(self) -> list[int]:
        """Actors that wait for updates."""
        return [actor for _, actor in self._bounded]

    def begin(self, step: int, actor: int, now_s: float) -> float | None:
        """Return when an actor begins a step, seconds, not before ``now_s``; None if it has to wait for updates."""
        allowed_s = self._allowed_s(step, actor)
        if allowed_s is None:
            self._bounded.append((step, actor))
            return None
        begins_s = max(now_s, allowed_s)
        self._begun_s[self._actors[actor]].append(begins_s)
        return begins_s

    def finish(self, actor: int, now_s: float) -> list[UpdateMessage]:
        """Record that an actor has finished its step; return the updates that the actor sends."""
        device = self._actors[actor]
        ended_s = self._ended_s[device]
        ended_s.append(now_s)
        step = len(ended_s) - 1
        outgoing = [number for number in self._outgoing.get(actor, ()) if self._exchanges[number].follows(step)]
        sent = [self._message(number, step, now_s) for number in outgoing if not self.edges[number].carries_means]
        exchanges = dict.fromkeys(self._exchanges[number] for number in outgoing)
        return sent + [message for each in exchanges for message in self._means(device, each, step)]

    def _means(self, device: str, exchanges: Exchanges | FragmentExchanges, step: int) -> list[UpdateMessage]:
        """Return the means that a device sends for the exchange after a step, if what it needs for them is there."""
        incoming, outgoing = self._averaged.get((id(exchanges), device), ((), ()))
        count, ended_s = exchanges.before(step + 1), self._ended_s[device]
        if not outgoing or len(ended_s) <= step or any(len(self._arrivals_s[each]) < count for each in incoming):
            return []
        ready_s = max((ended_s[step], *(self._arrivals_s[each][count - 1] for each in incoming)))
        return [self._message(number, step, ready_s) for number in outgoing]

    def _message(self, number: int, step: int, ready_s: float) -> UpdateMessage:
        # Updates between two devices leave one after the other, also those before and after a new epoch.
        edge = self.edges[number]
        free_s = self._free_s.get((edge.sender, edge.receiver), 0.0)
        return UpdateMessage(step, -1, edge.size_bytes, max(ready_s, free_s), edge=number)

    def arrive(self, message: UpdateMessage) -> tuple[list[tuple[int, int]], list[UpdateMessage]]:
        """Record the arrival of an update.

        Returns:
            The pairs (step, actor) whose actor waited for this update, and the means that the receiver sends now.
        """
        self._arrivals_s[message.edge].append(message.arrived_s)
        edge = self.edges[message.edge]
        self._departed_s[edge.sender, edge.receiver] = message.departed_s
        released = [(step, actor) for step, actor in self._bounded if message.edge in self._incoming.get(actor, ())]
        self._bounded = [each for each in self._bounded if each not in released]
        is_of_part = edge.part is not None and not edge.carries_means
        exchanges = self._exchanges[message.edge]
        return released, self._means(edge.receiver, exchanges, message.step) if is_of_part else []

    def send_event(self, message: UpdateMessage) -> Event:
        """Return the event of sending an update."""
        edge = self.edges[message.edge]
        place = (edge.sender, edge.receiver, edge.pipelines[0], -1, -1, message.step)
        times_s = (message.ready_s, message.departed_s)
        return Event(EventKind.SEND, *place, UPDATE_ACTION, *times_s, edge.size_bytes, arrived_s=message.arrived_s)

    def events(self) -> Iterator[Event]:
        """Return an event for each update that was applied, with its staleness, in the order of arrival."""
        return merge(self._earlier, self._events(), key=attrgetter("start_s"))

    def _events(self) -> Iterator[Event]:
        edges = (map(partial(self._event, edge), range(len(times))) for edge, times in enumerate(self._arrivals_s))
        return merge(*edges, key=attrgetter("start_s"))

    def _allowed_s(self, step: int, actor: int) -> float | None:
        """Return the earliest start of an actor's step, seconds; None if not known yet, 0 without a staleness bound."""
        bound = _bound(self._how)
        if bound is None:
            return 0.0
        if self._how.has_outer_step and self._is_copied(step):
            bound = 0
        latest_s = self.settled_s(self._actors[actor], step)
        for edge in self._incoming.get(actor, ()):
            exchanges = self._exchanges[edge].before(step - bound)
            if exchanges:
                if len(self._arrivals_s[edge]) < exchanges:
                    return None
                latest_s = max(latest_s, self._arrivals_s[edge][exchanges - 1])
        return latest_s

    def _event(self, number: int, exchange: int) -> Event:
        edge = self.edges[number]
        exchanges = self._exchanges[number]
        arrived_s = self._arrivals_s[number][exchange]
        begun_s = self._begun_s[edge.sender][max(exchanges.end_of(exchange), exchanges.first_step)]
        known = exchanges.end_of(self._arrived(number, begun_s))
        staleness = bisect_right(self._ended_s[edge.receiver], arrived_s) - known
        step = exchanges.last_step(exchange)
        place = (edge.receiver, edge.sender, edge.pipelines[1], edge.stage, -1, step)
        return Event(EventKind.UPDATE, *place, "", arrived_s, arrived_s, edge.size_bytes, staleness)

    def _arrived(self, number: int, now_s: float) -> int:
        """Return how many exchanges the sender of an edge had received from its receiver, for all layers they share.

        Only updates of the same fragment count, with the same settings.
        """
        edge = self.edges[number]
        back = self._between.get((id(self._exchanges[number]), edge.receiver, edge.sender), ())
        return min((bisect_right(self._arrivals_s[each], now_s) for each in back), default=0)


def _no_times() -> "array[float]":
    return array("d")


def _bound(synchronisation: Synchronisation) -> int | None:
    """Return how many steps after the step that an update follows a pipeline waits for it; None if it never does."""
    return synchronisation.outer.overlap_steps if synchronisation.has_outer_step else synchronisation.staleness_bound
