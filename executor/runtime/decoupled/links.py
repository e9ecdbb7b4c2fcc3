"""Connections between devices of workers and syncers: TCP with TLS, each by itself, so that a lost one hurts no other.

A message is one of `executor.core.control_channel`, followed by its payload:

======= ==================================================== ==========================================================
kind    fields; payload                                      sent
======= ==================================================== ==========================================================
hello   device, number of its worker's session, versions     by a worker when it has connected
sent    rows, the fields of `Contribution` after the layer;  by a worker after a step
        pseudo-gradients
mark    step of a checkpoint                                 by a worker when its state was copied for it
last    none                                                 by a worker after its last step
news    rows (layer, version, step), step of the last mark;  by a syncer after outer steps, or to a worker that joins
        common parameters
wanted  device of a worker that joins, layers                by a syncer to a device of another worker
state   device that joins, layers; state of layers with the  by that device after its step, and by the syncer to the
        parameters, empty if nobody gives it                 one that joins
over    none                                                 by a syncer after the last outer steps of all workers
======= ==================================================== ==========================================================
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch

from executor.core.clock import RunClock
from executor.core.control_channel import Channel
from executor.core.control_channel import Message as Words
from executor.core.failures import PeerLostError
from executor.core.messages import CheckpointMark
from executor.runtime.decoupled.common_layers import News, Sent, States, Wanted
from executor.transport.connection import Message, Sender
from executor.transport.timed_path import Emulation
from planner.plan.outer_rounds import Contribution

SENT, MARK, LAST, NEWS, OVER, HELLO = "sent", "mark", "last", "news", "over", "hello"
WANTED, STATE = "wanted", "state"

# What a link tells its owner: the words, their payload, and the run second of their arrival.
Heard = Callable[[Words, torch.Tensor, float], None]


@dataclass(frozen=True, slots=True)
class _Done:
    """A message that the operating system has taken."""

    def wait(self, timeout: timedelta) -> None:
        """Return at once."""


@dataclass(eq=False)
class _ChannelSender(Sender):
    """Sends messages over a channel, at their times on the emulated links."""

    _channel: Channel
    _words: dict[int, tuple[str, dict[str, Any]]]

    def _start(self, message: Message) -> _Done:
        kind, fields = self._words.pop(message.tag)
        # A lost connection raises no error here, but ends the thread that listens.
        self._channel.send(kind, message.payload.numpy().tobytes(), **fields)
        return _Done()


class LayerLink:
    """One end of a connection: sends in order without waiting, and hears in a thread of its own.

    Args:
        channel: The connection, on which both ends have proved themselves.
        peer: Name of the device at the other end.
        emulation: Emulates the links to that device; None leaves the network as it is.
        heard: Called with each message, in a thread of this link.
        lost: Called when the connection has ended, in the same thread.
        failed: Called with an error of a thread.
    """

    def __init__(
        self,
        channel: Channel,
        peer: str,
        clock: RunClock,
        emulation: Emulation | None,
        heard: Heard,
        lost: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._heard, self._lost, self._failed = heard, lost, failed
        self._words: dict[int, tuple[str, dict[str, Any]]] = {}
        self._count = 0
        self._sender = _ChannelSender(peer, clock, failed, channel, self._words, _emulation=emulation)
        threading.Thread(target=self._listen, name=f"link to {peer}", daemon=True).start()

    def send(
        self,
        kind: str,
        payload: torch.Tensor,
        ready_s: float,
        departed: Callable[[float], None] = lambda departed_s: None,
        **fields: Any,
    ) -> None:
        """Send a message, not before run second ``ready_s``."""
        self._count += 1
        self._words[self._count] = (kind, fields)
        self._sender.send(Message(payload, self._count, ready_s, departed))

    def close(self) -> None:
        """End the connection, with whatever is being sent."""
        self._sender.abandon()
        self._channel.close()

    def _listen(self) -> None:
        try:
            while (words := self._channel.receive()) is not None:
                payload = self._channel.receive_payload(words.get("payload_bytes", 0))
                if payload is None:
                    break
                values = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0)
                self._heard(words, values, self._clock.now_s())
            self._lost()
        except Exception as error:
            self._failed(error)


class SyncerLink:
    """A worker's end of the connection to a syncer; see `executor.runtime.decoupled.updates.WorkerLink`.

    Methods raise `PeerLostError` if the syncer is lost.
    """

    def __init__(
        self,
        channel: Channel,
        syncer: str,
        clock: RunClock,
        emulation: Emulation | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self._syncer = syncer
        self._clock = clock
        self._changed = threading.Condition()
        self._arrived: list[News] = []
        self._states: list[States] = []
        self._wanted: list[Wanted] = []
        self._is_over = self._is_lost = False
        self._link = LayerLink(channel, syncer, clock, emulation, self._hear, self._lose, failed)

    def introduce(self, device: str, session: int, versions: Mapping[int, int]) -> None:
        """Tell the syncer who this is and which versions it has of layers.

        Args:
            device: Name of this device.
            session: Number of the session of its worker; in any but the first it takes over all layers.
            versions: The version of each layer that it has taken over last.
        """
        rows = [[layer, version] for layer, version in versions.items()]
        self._link.send(HELLO, torch.empty(0), 0.0, device=device, session=session, rows=rows)

    def send(self, sent: Sent, ready_s: float, departed: Callable[[float], None]) -> None:
        """Send pseudo-gradients without waiting."""
        rows = [[layer, *astuple(each)] for layer, each in sent.layers.items()]
        self._link.send(SENT, sent.payload, ready_s, departed, rows=rows)

    def take(self) -> list[News]:
        """Return what has arrived since the last call."""
        with self._changed:
            if self._is_lost and not self._is_over:
                raise PeerLostError(f"lost the connection to device '{self._syncer}', which takes the outer steps")
            arrived, self._arrived = self._arrived, []
            return arrived

    def take_states(self) -> list[States]:
        """Return the states of layers that have arrived since the last call."""
        with self._changed:
            states, self._states = self._states, []
            return states

    def take_wanted(self) -> list[Wanted]:
        """Return what other workers have asked for since the last call."""
        with self._changed:
            wanted, self._wanted = self._wanted, []
            return wanted

    def give(self, device: str, states: States, ready_s: float, departed: Callable[[float], None]) -> None:
        """Send the state of layers for a device of a worker that joins, without waiting."""
        self._link.send(STATE, states.payload, ready_s, departed, **state_words(device, states))

    def wait(self) -> None:
        """Wait until common parameters or the state of layers arrive, or are there already."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._states or self._is_lost or self._is_over)

    def mark(self, mark: CheckpointMark) -> None:
        """Say that what was sent before is in the worker's part of a checkpoint, and nothing that will be."""
        self._link.send(MARK, torch.empty(0), self._clock.now_s(), **mark.to_data())

    def end(self) -> None:
        """Say that nothing more is sent."""
        self._link.send(LAST, torch.empty(0), self._clock.now_s())

    def await_end(self) -> None:
        """Wait for the last outer steps of all workers."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._is_lost)

    def close(self) -> None:
        """End the connection."""
        self._link.close()

    def _hear(self, words: Words, payload: torch.Tensor, arrived_s: float) -> None:
        with self._changed:
            if words["kind"] == NEWS:
                versions = {layer: (version, step) for layer, version, step in words["rows"]}
                self._arrived.append(News(versions, payload, arrived_s, words["snapshot"]))
            elif words["kind"] == STATE:
                self._states.append(states_of(words, payload, arrived_s))
            elif words["kind"] == WANTED:
                self._wanted.append(Wanted(words["device"], tuple(words["layers"])))
            self._is_over = self._is_over or words["kind"] == OVER
            self._changed.notify_all()

    def _lose(self) -> None:
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()


def sent_of(words: Words, payload: torch.Tensor) -> Sent:
    """Return the pseudo-gradients in a message of a worker."""
    layers = {layer: Contribution(*fields) for layer, *fields in words["rows"]}
    return Sent(layers, payload)


def states_of(words: Words, payload: torch.Tensor, arrived_s: float) -> States:
    """Return the state of layers in a message."""
    return States(tuple(words["layers"]), payload, arrived_s)


def state_words(device: str, states: States) -> dict[str, Any]:
    """Return what a message for ``device`` says of the layers whose state it has."""
    return {"device": device, "layers": list(states.layers)}


def news_rows(news: News) -> list[list[int]]:
    """Return what a message of a syncer says of its layers."""
    return [[layer, version, step] for layer, (version, step) in news.versions.items()]
