"""Layers on their way from device to device, before the first step of a set-up, over the network of that step."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import simpy

from planner.adapt.migration import LayerTransfer, Migration
from planner.events.event import MIGRATE_ACTION, Event, EventKind
from planner.scenario.scenario import Scenario
from sim.network.connection import Message
from sim.network.network import Network
from traces.common.errors import RunError


class StateTransfer:
    """What travels; whoever waits for it begins when all that it needs is there.

    What goes the same way leaves in order, and before anything of the step. Devices that leave meanwhile are not looked
    at: what they send still arrives.

    Args:
        moves: What.
        step: The first one of the set-up.
        ready_at_s: Gives the second of the run from which on a device can send.
        actor_of: The actor of each device that receives.
    """

    def __init__(
        self, moves: Sequence[LayerTransfer], step: int, ready_at_s: Callable[[str], float], actor_of: Mapping[str, int]
    ) -> None:
        self._actor_of = actor_of
        self._under_way = {
            Message(step, number, move.size_bytes, ready_at_s(move.source)): move for number, move in enumerate(moves)
        }
        self._awaited = Counter(actor_of[move.target] for move in moves)
        self.end_s = 0.0

    @property
    def waiting(self) -> frozenset[int]:
        """Actors that need something that is not there yet."""
        return frozenset(actor for actor, count in self._awaited.items() if count)

    def send(self, network: Network) -> None:
        """Hand everything over."""
        for parcel, move in list(self._under_way.items()):
            network.send(network.number[move.source, move.target], parcel)

    def __contains__(self, parcel: Message) -> bool:
        return parcel in self._under_way

    def arrive(self, parcel: Message, arrived_s: float) -> int | None:
        """Take what has arrived; return the actor that waits for nothing more now, None if there is none."""
        actor = self._actor_of[self._under_way.pop(parcel).target]
        self._awaited[actor] -= 1
        self.end_s = max(self.end_s, arrived_s)
        return None if self._awaited[actor] else actor

    def row(self, parcel: Message, departed_s: float) -> Event:
        """Return the row of what is under way."""
        move = self._under_way[parcel]
        place = (move.source, move.target, -1, -1, -1, parcel.step, MIGRATE_ACTION)
        return Event(EventKind.MIGRATE, *place, parcel.ready_s, departed_s, move.size_bytes)


def travel_s(migration: Migration, scenario: Scenario, connections: int) -> float:
    """Return how long a migration takes from the start of a run if nothing else is on the links, seconds.

    Raises:
        RunError: A link stays at rate zero for ever.
    """
    environment = simpy.Environment()
    number = {target: place for place, target in enumerate(dict.fromkeys(move.target for move in migration.moves))}
    under_way = StateTransfer(migration.moves, 0, lambda _: 0.0, number)
    pairs = {(move.source, move.target): True for move in migration.moves}

    def deliver(parcel: Message, departed_s: float, arrived_s: float) -> None:
        under_way.arrive(parcel, arrived_s)

    under_way.send(Network(environment, scenario, pairs, connections, deliver, lambda: None))
    environment.run()
    if under_way.waiting:
        raise RunError("layers that change devices never arrive; does a link stay at rate zero?")
    return under_way.end_s
