"""Probes, by which a run measures the propagation delay of links between regions that its plan does not use.

They are datagrams and no messages of training: a link that loses them, or that is down, delays nothing, and a rank that
computes nothing takes part as well. `planner.adapt.unused_links` says which ranks send them, and which row they become.
"""

import hmac
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.transport.timed_path import Emulation
from planner.adapt.unused_links import LINK_PROBE_BYTES, link_probe, unused_paths
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import RunError

# Step, time of sending in run seconds, index of the sender; after it, the first bytes of an HMAC of it.
_BODY = struct.Struct("!qdI")

# How long the receiving thread waits at most before it looks whether it shall end, seconds.
_LONGEST_WAIT_S = 0.5


class AddressBook(Protocol):
    """What ranks tell each other, a part of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Tell a value to all ranks."""

    def check(self, keys: list[str]) -> bool:
        """Return whether the values of all keys are known."""

    def get(self, key: str) -> bytes:
        """Return the value of a key."""


@dataclass(eq=False)
class LinkProbes:
    """Sends and receives the probes of one rank in one session.

    Args:
        devices: Names of all devices of the job, in the same order on all ranks.
        host: Address of this host at which the rank receives probes.
        key: The job's key, by which a rank knows the probes of others.
        session: Text that no other session has, for the keys of ``book``.
        emulate: Returns the emulation of the links to a device; None if the network has them.
    """

    _device: str
    _devices: Sequence[str]
    _scenario: Scenario
    _host: str
    _key: bytes
    _session: str
    _book: AddressBook
    _clock: RunClock
    _rows: EventRecorder
    _emulate: Callable[[str], Emulation | None]

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((self._host, 0))
        self._socket.settimeout(_LONGEST_WAIT_S)
        self._book.set(self._entry(self._device), f"{self._socket.getsockname()[1]} {self._host}")
        self._is_closed = False
        # Targets to which an emulated probe is on its way: one at a time.
        self._under_way: set[str] = set()
        # By sender: step of the newest probe, since datagrams may come twice or be sent again by somebody else.
        self._newest: dict[int, int] = {}
        threading.Thread(target=self._receive, name="link-probes", daemon=True).start()

    def send(self, step: int, plan: Plan) -> None:
        """Send the probes that are this rank's with a step, and return at once."""
        for source, target in unused_paths(plan, self._scenario):
            if source != self._device or target in self._under_way or not self._book.check([self._entry(target)]):
                continue
            start_s = self._clock.now_s()
            body = _BODY.pack(step, start_s, self._devices.index(source))
            emulation = self._emulate(target)
            if emulation is None:
                self._send(target, body)
                continue
            self._under_way.add(target)
            deliver = partial(self._deliver, emulation, target, body, start_s)
            threading.Thread(target=deliver, name="link-probe", daemon=True).start()

    def close(self) -> None:
        """Send and record no more."""
        self._is_closed = True

    def _deliver(self, emulation: Emulation, target: str, body: bytes, start_s: float) -> None:
        """Send a probe when it would arrive over emulated links."""
        # The links may carry nothing any more, and the emulation may have been closed meanwhile.
        with suppress(RunError, ValueError):
            departed_s = emulation.transmit(8 * LINK_PROBE_BYTES, start_s, 1)
            self._clock.sleep_until(emulation.delivery_s(departed_s))
            self._send(target, body)
        self._under_way.discard(target)

    def _send(self, target: str, body: bytes) -> None:
        # Without a route to the target, or with the socket closed, a probe is lost as others are on their way.
        with suppress(OSError):
            port, host = self._book.get(self._entry(target)).decode().split(" ")
            self._socket.sendto(body + self._proof(target, body), (host, int(port)))

    def _receive(self) -> None:
        with self._socket:
            while not self._is_closed:
                try:
                    # One byte more than a probe has, so that longer datagrams are none.
                    datagram = self._socket.recv(LINK_PROBE_BYTES + 1)
                except TimeoutError:
                    continue
                self._take(datagram, self._clock.now_s())

    def _take(self, datagram: bytes, arrived_s: float) -> None:
        body, proof = datagram[: _BODY.size], datagram[_BODY.size :]
        if self._is_closed or not hmac.compare_digest(proof, self._proof(self._device, body)):
            return
        step, start_s, sender = _BODY.unpack(body)
        if step > self._newest.get(sender, -1):
            self._newest[sender] = step
            # The clocks of two hosts differ, so that an arrival may seem to precede the sending.
            self._rows.log(link_probe(self._devices[sender], self._device, step, start_s, max(start_s, arrived_s)))

    def _entry(self, device: str) -> str:
        return f"{self._session}/probes/{device}"

    def _proof(self, receiver: str, body: bytes) -> bytes:
        """Return what only ranks of this session can add to a probe for a receiver."""
        digest = hmac.digest(self._key, self._entry(receiver).encode() + body, "sha256")
        return digest[: LINK_PROBE_BYTES - _BODY.size]
