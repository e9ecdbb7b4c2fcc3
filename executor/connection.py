"""A connection to one other rank: messages leave in order; shaped, they arrive when the emulated link says so."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.clock import RunClock
from executor.peers import blaming
from executor.shaper import LinkShaper
from planner.cluster import Link


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes for the peer.

    Attributes:
        payload: One-dimensional uint8 tensor; not changed until it has departed.
        tag: Which receive of the peer it is for.
        ready_s: When it could depart, run seconds.
        departed: Called with the run seconds at which the last byte departed.
    """

    payload: torch.Tensor
    tag: int
    ready_s: float
    departed: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class EmulatedPath:
    """The emulated links to the peer."""

    shaper: LinkShaper
    path: tuple[Link, ...]


class Connection:
    """Sends to one device from threads of its own, so that compute never waits for the network."""

    def __init__(
        self,
        device: str,
        rank: int,
        clock: RunClock,
        emulated: EmulatedPath | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self._device = device
        self._rank = rank
        self._clock = clock
        self._failed = failed
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._in_the_air: queue.SimpleQueue[tuple[float, Message] | None] = queue.SimpleQueue()
        loops = [self._send_directly] if emulated is None else [lambda: self._emulate(emulated), self._deliver]
        self._threads = [threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Hand a message over; returns at once."""
        self._outbox.put(message)

    def close(self) -> None:
        """Wait until everything handed over has been sent, and end the threads."""
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()

    def _send_directly(self) -> None:
        while (message := self._outbox.get()) is not None:
            self._hand_to_gloo(message)
            message.departed(self._clock.now_s())

    def _emulate(self, emulated: EmulatedPath) -> None:
        while (message := self._outbox.get()) is not None:
            departed_s = emulated.shaper.transmit(emulated.path, 8 * message.payload.numel(), message.ready_s)
            self._in_the_air.put((emulated.shaper.delivery_s(emulated.path, departed_s), message))
            message.departed(departed_s)
        self._in_the_air.put(None)

    def _deliver(self) -> None:
        while (flight := self._in_the_air.get()) is not None:
            delivery_s, message = flight
            self._clock.sleep_until(delivery_s)
            self._hand_to_gloo(message)

    def _hand_to_gloo(self, message: Message) -> None:
        with blaming(self._device):
            work = dist.isend(message.payload, self._rank, tag=message.tag)
            assert work is not None
            work.wait()

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:
            self._failed(error)
