"""Transfers of layers between devices before the first step of an epoch, over the network of the epoch."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import simpy

from planner.adapt.migration import LayerTransfer, Migration
from planner.scenario.scenario import Scenario
from sim.network.connection import Message
from sim.network.network import Network
from traces.common.errors import RunError


@dataclass(eq=False, slots=True, kw_only=True)
class LayerMessage(Message):
    """A message with the state of layers."""

    transfer: LayerTransfer


class StateTransfer:
    """The transfers of layers before an epoch, and the actors that wait for layers.

    Messages between the same two devices leave in order, before the messages of the first step. Absences of devices
    are ignored during the transfers: messages of absent devices still arrive.

    Args:
        actor_of: Actor of each device that receives layers.

    Attributes:
        end_s: Latest arrival of layers so far, seconds from the start of the run.
    """

    def __init__(self, transfers: Sequence[LayerTransfer], actor_of: Mapping[str, int]) -> None:
        self._transfers = transfers
        self._actor_of = actor_of
        self._awaited = Counter(actor_of[transfer.target] for transfer in transfers)
        self.end_s = 0.0

    @property
    def waiting(self) -> frozenset[int]:
        """Actors that wait for layers."""
        return frozenset(actor for actor, count in self._awaited.items() if count)

    def send(self, network: Network, step: int, ready_at_s: Callable[[str], float]) -> None:
        """Send all layers."""
        for each in self._transfers:
            message = LayerMessage(step, -1, each.size_bytes, ready_at_s(each.source), transfer=each)
            network.connection(each.source, each.target).send(message)

    def arrive(self, message: LayerMessage) -> int | None:
        """Record arrived layers; return the receiving actor if it now has all its layers, None otherwise."""
        actor = self._actor_of[message.transfer.target]
        self._awaited[actor] -= 1
        self.end_s = max(self.end_s, message.arrived_s)
        return None if self._awaited[actor] else actor


def travel_s(migration: Migration, scenario: Scenario, connections: int) -> float:
    """Return the duration of a migration that starts with the run, without other traffic on the links, seconds.

    Raises:
        RunError: A link stays at rate zero for ever.
    """
    environment = simpy.Environment()
    pairs = {(each.source, each.target): True for each in migration.moves}
    network = Network(environment, scenario, pairs, connections)
    receivers = dict.fromkeys((each.target for each in migration.moves), 0)
    StateTransfer(migration.moves, receivers).send(network, 0, lambda _: 0.0)
    environment.run()
    if len(network.delivered) < len(migration.moves):
        raise RunError("the layers of a migration never arrive; does a link of their paths stay at rate zero?")
    return max((message.arrived_s for message in network.delivered), default=0.0)
