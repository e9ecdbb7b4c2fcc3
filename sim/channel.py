"""A connection from one device to another: messages leave in order, one at a time, and arrive after the latency."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import simpy

from planner.cluster import Link
from sim.network import Network


@dataclass(frozen=True, slots=True)
class Delivery:
    """The two moments of a message: its last bit has departed; it is there."""

    departed: simpy.Event
    arrived: simpy.Event


class Channel:
    """One direction between two devices, over the links of ``path``."""

    def __init__(self, environment: simpy.Environment, network: Network, path: Sequence[Link]) -> None:
        self._environment = environment
        self._network = network
        self._path = path
        self._last: Delivery | None = None

    def send(self, size_bytes: int) -> Delivery:
        """Hand over a message of ``size_bytes``; it leaves when those before it have departed."""
        delivery = Delivery(self._environment.event(), self._environment.event())
        self._environment.process(self._carry(8 * size_bytes, self._last, delivery))
        self._last = delivery
        return delivery

    def _carry(self, bits: float, before: Delivery | None, delivery: Delivery) -> Generator[simpy.Event, None, None]:
        if before is not None:
            yield before.departed
        yield self._network.transmit(self._path, bits)
        delivery.departed.succeed()
        yield self._environment.timeout(sum(link.latency_at_s(self._environment.now) for link in self._path))
        if before is not None:
            # Nothing overtakes, also where the latency falls.
            yield before.arrived
        delivery.arrived.succeed()
