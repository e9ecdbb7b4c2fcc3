"""Connections that send bytes to one device each, in threads of their own, so that compute never waits for them."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from executor.core.failures import blaming
from executor.core.timeouts import timeouts
from executor.transport.receive import RECV_TIMEOUT
from executor.transport.timed_path import Emulation


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes to send to another rank.

    Attributes:
        payload: A one-dimensional uint8 tensor. It must not change after `Connection.send`, which reads it later.
        tag: Identifies the posted receive that gets the message.
        ready_s: The earliest departure in run seconds.
        departed: Called with the run second of the departure: that of the last byte on the emulated links or, without
            a shaper, that at which gloo has completed the send.
        stands_for_bytes: Bytes of the message for which the payload is a stub; None if it is the message itself.
        flows: Number of equal parts in which the emulated links carry the message at once.
    """

    payload: torch.Tensor
    tag: int
    ready_s: float
    departed: Callable[[float], None]
    stands_for_bytes: int | None = None
    flows: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes that the message has on the emulated links."""
        return self.payload.numel() if self.stands_for_bytes is None else self.stands_for_bytes


class Sending(Protocol):
    """A message that is being sent."""

    def wait(self, timeout: timedelta) -> object:
        """Wait until it is sent."""


@dataclass(eq=False)
class Sender:
    """Sends to one device in two threads of its own, so that compute never waits for the network.

    Without a shaper several sends are in progress at once: gloo holds each back until the peer has posted its receive,
    and later messages do not wait for that. With a shaper messages go to gloo one by one, each at its arrival time: a
    message whose receive is not posted yet delays the delivery of later messages, but not their times on the links.

    Args:
        failed: Called with an error that ends one of the threads, in that thread.
        emulation: Emulates the links to the device; None leaves the network as it is.
    """

    _device: str
    _clock: RunClock
    _failed: Callable[[Exception], None]
    _emulation: Emulation | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._sending: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_abandoned = False
        start = self._send if self._emulation is None else partial(self._emulate, self._emulation)
        loops = [partial(self._start_all, start), self._complete_all]
        self._threads = [threading.Thread(target=self._guard, args=(loop,), daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Queue a message, and return at once."""
        self._outbox.put(message)

    def close(self) -> None:
        """Wait until every queued message has been sent or the connection is abandoned, and end the threads."""
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(timeouts().abandon_s)
            while thread.is_alive() and not self._is_abandoned:
                thread.join(timeouts().abandon_s)

    def abandon(self) -> None:
        """Drop the queued messages, and let `close` give up on threads that do not end soon.

        gloo forgets a send if the peer dies between its ready notice and the first byte of the message: the wait for
        such a send ends only at its timeout (measured: 3 of 60 killed peers).
        """
        self._is_abandoned = True

    def _start_all(self, start: Callable[[Message], Callable[[], None]]) -> None:
        """Start every message in the first thread; the second one calls the functions that wait for completion."""
        try:
            while (message := self._outbox.get()) is not None and not self._is_abandoned:
                self._sending.put(start(message))
        finally:
            # Also after an error, so that the second thread ends.
            self._sending.put(None)

    def _complete_all(self) -> None:
        while (complete := self._sending.get()) is not None:
            complete()

    def _send(self, message: Message) -> Callable[[], None]:
        with blaming(self._device):
            work = self._start(message)

        def complete() -> None:
            with blaming(self._device):
                work.wait(RECV_TIMEOUT)
            message.departed(self._clock.now_s())

        return complete

    def _emulate(self, emulation: Emulation, message: Message) -> Callable[[], None]:
        departed_s = emulation.transmit(8 * message.size_bytes, message.ready_s, message.flows)
        message.departed(departed_s)

        def deliver() -> None:
            self._clock.sleep_until(emulation.delivery_s(departed_s))
            with blaming(self._device):
                self._start(message).wait(RECV_TIMEOUT)

        return deliver

    def _start(self, message: Message) -> Sending:
        """Begin to send a message."""
        raise NotImplementedError

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            self._failed(error)


@dataclass(eq=False)
class Connection(Sender):
    """Sends to one device by gloo.

    Args:
        rank: The rank of the device in the group.
        group: The process group to use, one of those that serve as parallel connections.
    """

    _rank: int
    _group: dist.ProcessGroup

    def _start(self, message: Message) -> dist.Work:
        work = dist.isend(message.payload, self._rank, group=self._group, tag=message.tag)
        assert work is not None
        return work
