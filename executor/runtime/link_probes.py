"""Probes, by which a run measures links between regions that its plan does not use.

They are datagrams and no messages of training: a link that loses them, or that is down, delays nothing, and a rank that
computes nothing takes part too. `planner.adapt.unused_links` says which ranks send them, and which rows they become. A
rank that computes nothing hears of a step up to two steps before it begins, and sends its probes then; the policy sees
those that it receives up to two steps later. In-process emulation holds probes back in threads, one for each path at a
time: until it has delivered one, it gets no other.
"""

import hmac
import queue
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
from planner.adapt.unused_links import (
    PACKET_BYTES,
    SMALL_BYTES,
    ProbeTimes,
    link_probe,
    probed_with,
    unused_paths,
)
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import RunError

# Step, time of sending in run seconds, index of the sender, index of the packet and of the last one; after it, the
# first bytes of an HMAC of it. The packet 0 is the small probe, the others are the large one.
_BODY = struct.Struct("!qdIHH")
_PROOF_BYTES = SMALL_BYTES - _BODY.size

# How long the receiving thread waits at most before it looks whether it shall end, seconds.
_LONGEST_WAIT_S = 0.5


@dataclass(slots=True)
class _Heard:
    """What has come of the latest probes of one sender: their step, the index of the last packet, bytes so far."""

    step: int
    index: int = 0
    large_bytes: int = 0


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
        devices: Names of the session's devices, in the same order on all ranks.
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
        try:
            self._socket.bind((self._host, 0))
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(_LONGEST_WAIT_S)
        self._book.set(self._entry(self._device), f"{self._socket.getsockname()[1]} {self._host}")
        self._is_closed = False
        self._present = frozenset(self._devices)
        self._times = ProbeTimes(self._scenario)
        # Targets to which emulated probes are on their way: a thread of its own holds them back.
        self._under_way: set[str] = set()
        # By sender; packets may come twice, or be sent again by somebody else.
        self._heard: dict[int, _Heard] = {}
        self._steps: queue.SimpleQueue[tuple[int, Plan] | None] = queue.SimpleQueue()
        for loop in (self._receive, self._send_all):
            threading.Thread(target=loop, name="link-probes", daemon=True).start()

    def send(self, step: int, plan: Plan) -> None:
        """Send the probes that are this rank's with a step, in a thread."""
        self._steps.put((step, plan))

    def close(self) -> None:
        """Send and record no more."""
        self._is_closed = True
        self._steps.put(None)

    def _send_all(self) -> None:
        while (begun := self._steps.get()) is not None and not self._is_closed:
            step, plan = begun
            for source, target in probed_with(step, unused_paths(plan, self._scenario, self._present)):
                if source == self._device and target not in self._under_way and self._book.check([self._entry(target)]):
                    # The addresses of a session that has ended are forgotten.
                    with suppress(RuntimeError):
                        self._probe(step, target)

    def _probe(self, step: int, target: str) -> None:
        """Send a small probe, and a large one, to a device if they are due."""
        now_s = self._clock.now_s()
        sizes_bytes = self._times.take_due(self._device, target, now_s)
        if not sizes_bytes:
            return
        last = sum(sizes_bytes[1:]) // PACKET_BYTES
        sender = self._devices.index(self._device)
        bodies = [_BODY.pack(step, now_s, sender, index, last) for index in range(last + 1)]
        port, host = self._book.get(self._entry(target)).decode().split(" ")
        packets = [self._packet(target, body) for body in bodies]
        send, emulation = partial(self._send, (host, int(port))), self._emulate(target)
        if emulation is None:
            send(packets)
            return
        self._under_way.add(target)
        deliver = partial(self._deliver, emulation, target, send, packets, now_s)
        threading.Thread(target=deliver, name="link-probe", daemon=True).start()

    def _deliver(
        self,
        emulation: Emulation,
        target: str,
        send: Callable[[Sequence[bytes]], None],
        packets: Sequence[bytes],
        ready_s: float,
    ) -> None:
        """Send probes when they would arrive over emulated links."""
        try:
            # The links may carry nothing any more, and the emulation may have been closed meanwhile.
            with suppress(RunError, ValueError, OSError):
                for part in (packets[:1], packets[1:]):
                    ready_s = emulation.transmit(8 * sum(map(len, part)), ready_s, 1)
                    self._clock.sleep_until(emulation.delivery_s(ready_s))
                    send(part)
        finally:
            self._under_way.discard(target)

    def _packet(self, target: str, body: bytes) -> bytes:
        packet = body + self._proof(target, body)
        return packet if _BODY.unpack(body)[3] == 0 else packet.ljust(PACKET_BYTES, b"\0")

    def _send(self, address: tuple[str, int], packets: Sequence[bytes]) -> None:
        if self._is_closed:
            return
        # Without a route to the target, or room for a packet, a probe is lost as others are on their way.
        with suppress(OSError):
            for packet in packets:
                self._socket.sendto(packet, address)

    def _receive(self) -> None:
        with self._socket:
            while not self._is_closed:
                try:
                    packet = self._socket.recv(PACKET_BYTES)
                except TimeoutError:
                    continue
                self._take(packet, self._clock.now_s())

    def _take(self, packet: bytes, arrived_s: float) -> None:
        body, proof = packet[: _BODY.size], packet[_BODY.size : SMALL_BYTES]
        if self._is_closed or not hmac.compare_digest(proof, self._proof(self._device, body)):
            return
        step, start_s, sender, index, last = _BODY.unpack(body)
        # The clocks of two hosts differ, so that an arrival may seem to precede the sending.
        arrived_s = max(start_s, arrived_s)
        heard = self._heard.get(sender, _Heard(-1))
        if index == 0 and step > heard.step:
            self._heard[sender] = _Heard(step)
            self._log(sender, step, SMALL_BYTES, start_s, arrived_s)
        elif step == heard.step and index > heard.index:
            heard.index = index
            heard.large_bytes += PACKET_BYTES
            if index == last:
                self._log(sender, step, heard.large_bytes, start_s, arrived_s)

    def _log(self, sender: int, step: int, size_bytes: int, start_s: float, arrived_s: float) -> None:
        self._rows.log(link_probe(self._devices[sender], self._device, step, size_bytes, start_s, arrived_s))

    def _entry(self, device: str) -> str:
        return f"{self._session}/probes/{device}"

    def _proof(self, receiver: str, body: bytes) -> bytes:
        """Return what only ranks of this session can add to a probe for a receiver."""
        digest = hmac.digest(self._key, self._entry(receiver).encode() + body, "sha256")
        return digest[:_PROOF_BYTES]
