"""The optimizer's state that workers give those that return after an absence, by way of syncers (diloco-decoupled)."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import simpy

from planner.adapt.migration import state_bytes
from planner.events.event import MIGRATE_ACTION, Event, EventKind
from planner.plan.decoupled import StateRequests
from planner.scenario.scenario import Scenario
from planner.scenario.training import OPTIMIZER_STATES
from sim.kernel.events import Timer
from sim.network.connection import Message
from sim.network.network import Network
from sim.updates.layer_holders import Holder


@dataclass(eq=False, slots=True, kw_only=True)
class StatesMessage(Message):
    """The state of layers on the way to a syncer, or on from there, for the device ``target`` of a worker.

    Attributes:
        returns: How many times the worker had returned when it asked.
    """

    sender: str
    receiver: str
    target: str
    layers: tuple[int, ...]
    returns: int


class StateTransfers:
    """Which worker gives what to whom, until it has arrived.

    Args:
        syncer_of: The syncer of each layer.
        able: Returns the workers that can give what they have.
        record: Called with each event.
        complete: Called with a worker that lacks no state any more, and the present time.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        network: Network,
        scenario: Scenario,
        holders: Sequence[Holder],
        syncer_of: Mapping[int, str],
        able: Callable[[], Sequence[int]],
        record: Callable[[Event], None],
        complete: Callable[[int, float], None],
    ) -> None:
        self._environment = environment
        self._network = network
        self._holders = holders
        self._syncer_of = syncer_of
        self._able = able
        self._record = record
        self._complete = complete
        self._has_state = OPTIMIZER_STATES[scenario.training.optimizer.name] > 0
        self._bytes = {layer: state_bytes(scenario, layer, layer + 1) for layer in syncer_of}
        self._worker_of = {holder.name: holder.worker for holder in holders}
        self._requests = StateRequests(len(set(self._worker_of.values())))
        # The layers whose state each worker lacks, and those whose state a device gives after its next step, by syncer
        # and receiving device.
        self._lacking: defaultdict[int, set[int]] = defaultdict(set)
        self._wanted: defaultdict[str, dict[tuple[str, str], set[int]]] = defaultdict(dict)
        self._returns: Counter[int] = Counter()

    def lacks(self, worker: int) -> bool:
        """Return whether a worker awaits the state of layers."""
        return bool(self._lacking[worker])

    def lose(self, worker: int, now_s: float) -> None:
        """Note that a worker is away; ask others for what it should have given."""
        self._lacking[worker].clear()
        self._returns[worker] += 1
        for holder in self._of(worker):
            self._requests.forget(worker, holder.elements)
            self._wanted.pop(holder.name, None)
            for other, layers in self._requests.owed_by(worker, holder.elements).items():
                self._ask(other, layers, now_s)

    def note_sent(self, worker: int) -> None:
        """Note that a worker has sent pseudo-gradients."""
        self._requests.note_sent(worker)

    def ask(self, worker: int, now_s: float) -> None:
        """Let another worker give one that returns the state of all its layers, if there is one that has it."""
        self._ask(worker, [layer for holder in self._of(worker) for layer in holder.elements], now_s)

    def give(self, holder: Holder, now_s: float) -> None:
        """Send the syncers what others want of a device, as it is now."""
        for (syncer, target), layers in sorted(self._wanted.pop(holder.name, {}).items()):
            returns = self._returns[self._worker_of[target]]
            self._send(holder.name, syncer, target, tuple(sorted(layers)), returns, now_s)

    def deliver(self, message: StatesMessage) -> None:
        """Record the departure of a message, and await its arrival."""
        self._record(migrate_event(message.sender, message.receiver, message))
        Timer(self._environment, message.arrived_s, lambda timer: self._arrive(message, timer.time_s))

    def _arrive(self, message: StatesMessage, now_s: float) -> None:
        worker = self._worker_of[message.target]
        if message.receiver != message.target:
            if self._requests.answer(worker, message.layers):
                returns = self._returns[worker]
                self._send(message.receiver, message.target, message.target, message.layers, returns, now_s)
        elif message.returns == self._returns[worker]:
            # Otherwise it was on its way to a process that is no more.
            self._lacking[worker] -= set(message.layers)
            self._complete_if_whole(worker, now_s)

    def _ask(self, worker: int, layers: Iterable[int], now_s: float) -> None:
        wanted = set(layers)
        giver = self._requests.ask(worker, wanted, self._able() if self._has_state else ())
        if giver is None:
            self._lacking[worker] -= wanted
            self._complete_if_whole(worker, now_s)
            return
        self._lacking[worker] |= wanted
        for target in self._of(worker):
            for source in self._of(giver):
                for layer in target.elements.keys() & source.elements.keys() & wanted:
                    self._wanted[source.name].setdefault((self._syncer_of[layer], target.name), set()).add(layer)

    def _complete_if_whole(self, worker: int, now_s: float) -> None:
        if not self._lacking[worker]:
            self._complete(worker, now_s)

    def _send(
        self, sender: str, receiver: str, target: str, layers: tuple[int, ...], returns: int, now_s: float
    ) -> None:
        size_bytes = sum(self._bytes[layer] for layer in layers)
        message = StatesMessage(
            -1, -1, size_bytes, now_s, sender=sender, receiver=receiver, target=target, layers=layers, returns=returns
        )
        self._network.connection(sender, receiver).send(message)

    def _of(self, worker: int) -> list[Holder]:
        return [holder for holder in self._holders if holder.worker == worker]


def migrate_event(source: str, target: str, message: Message) -> Event:
    """Return the event of sending the state of layers from one device to another."""
    place = (source, target, -1, -1, -1, message.step, MIGRATE_ACTION)
    times_s = (message.ready_s, message.departed_s)
    return Event(EventKind.MIGRATE, *place, *times_s, message.size_bytes, arrived_s=message.arrived_s)
