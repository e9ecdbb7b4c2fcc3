"""Passes the state of layers, at a syncer, from a worker that has it to one that joins.

Workers are connected with syncers only. Which of them gives is decided by `planner.plan.decoupled.StateRequests`.
"""

from collections.abc import Callable, Iterable, Mapping

import torch

from executor.core.clock import RunClock
from executor.core.control_channel import Message as Words
from executor.runtime.decoupled.common_layers import States
from executor.runtime.decoupled.links import STATE, WANTED, LayerLink, state_words, states_of
from planner.events.event import MIGRATE_ACTION, Event, EventKind
from planner.plan.decoupled import StateRequests


class StateRelay:
    """The requests of workers that join, at one syncer.

    Args:
        syncer: Name of the syncer.
        worker_of: The worker that each device belongs to.
        layers: The layers of each device that this syncer merges.
        has_state: Whether the optimizer keeps a state; else nobody is asked.
        log: Called with each row, in any thread.
    """

    def __init__(
        self,
        syncer: str,
        worker_of: Mapping[str, int],
        layers: Mapping[str, frozenset[int]],
        has_state: bool,
        clock: RunClock,
        log: Callable[[Event], None],
    ) -> None:
        self._syncer = syncer
        self._worker_of = worker_of
        self._layers = layers
        self._has_state = has_state
        self._clock = clock
        self._log = log
        self._links: dict[str, LayerLink] = {}
        self._ended: set[int] = set()
        self._requests = StateRequests(len(set(worker_of.values())))

    def connect(self, device: str, link: LayerLink, *, joins: bool) -> None:
        """Note that a device is connected; ask for the state of its layers if its process has replaced a lost one."""
        if device in self._links:
            # The end of the connection before was not seen yet.
            self.lose(device)
        self._links[device] = link
        self._ended.discard(self._worker_of[device])
        if joins:
            self._ask(self._worker_of[device], self._layers[device])

    def lose(self, device: str) -> None:
        """Note that the connection of a device has ended; ask others for what it should have given."""
        self._links.pop(device, None)
        self._requests.forget(self._worker_of[device], self._layers[device])
        self._ask_others(device)

    def end(self, device: str) -> None:
        """Note that a device takes no further step; ask others for what it should have given."""
        self._ended.add(self._worker_of[device])
        self._ask_others(device)

    def note_sent(self, device: str) -> None:
        """Note that a device has sent pseudo-gradients."""
        self._requests.note_sent(self._worker_of[device])

    def pass_on(self, giver: str, words: Words, payload: torch.Tensor, arrived_s: float) -> None:
        """Send on what a device gives, unless the one that wanted it has it already, or is lost."""
        # Only marks the arrival, for the row of the sender.
        self._log(Event(EventKind.RECEIVE, *self._place(giver), arrived_s, arrived_s, payload.numel()))
        states, device = states_of(words, payload, arrived_s), str(words["device"])
        if self._requests.answer(self._worker_of[device], states.layers):
            self._send(device, states)

    def _ask_others(self, device: str) -> None:
        for worker, layers in self._requests.owed_by(self._worker_of[device], self._layers[device]).items():
            self._ask(worker, layers)

    def _ask(self, worker: int, layers: Iterable[int]) -> None:
        wanted = frozenset(layers)
        giver = self._requests.ask(worker, wanted, self._able() if self._has_state else ())
        for device in self._devices(worker):
            own = self._layers[device] & wanted
            if giver is None and own:
                self._send(device, States(tuple(sorted(own)), torch.empty(0, dtype=torch.uint8)))
            for source in self._devices(giver) if giver is not None else ():
                part = sorted(own & self._layers[source])
                if part:
                    self._links[source].send(WANTED, torch.empty(0), self._clock.now_s(), device=device, layers=part)

    def _able(self) -> list[int]:
        """Return the workers all of whose devices are connected, and that take further steps."""
        workers = set(self._worker_of.values()) - self._ended
        return sorted(each for each in workers if all(device in self._links for device in self._devices(each)))

    def _devices(self, worker: int) -> list[str]:
        return [device for device, own in self._worker_of.items() if own == worker]

    def _send(self, device: str, states: States) -> None:
        link = self._links.get(device)
        if link is None:
            return
        start_s, size_bytes = self._clock.now_s(), states.payload.numel()

        def departed(end_s: float) -> None:
            if size_bytes:
                self._log(Event(EventKind.MIGRATE, *self._place(device), start_s, end_s, size_bytes))

        link.send(STATE, states.payload, start_s, departed, **state_words(device, states))

    def _place(self, device: str) -> tuple[str, str, int, int, int, int, str]:
        return self._syncer, device, -1, -1, -1, -1, MIGRATE_ACTION
