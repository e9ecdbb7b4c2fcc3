"""How far the clock of this machine is from that of the job's head: their monotonic clocks begin anywhere.

The head answers each byte with the reading of its clock. Of several round trips the quickest says most: the answer was
under way for half of it, give or take what the two directions differ by. As the clocks drift by some 10 ms in an hour,
a thread asks again from time to time, and leads the run's clock there in small steps.
"""

import math
import os
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Protocol

from executor.core.json_lines import AGENT_ADDRESS, SILENCE, KeeperLine

_READING = struct.Struct("d")
_ROUND_TRIPS = 8
_EVERY_S = 5.0
_REMEMBERED = 12
# No transfer seems to end before it began if the clock goes back by less than the least latency.
_MOST_STEP_S = 0.0002
_PATIENCE_S = 30.0


class Adjustable(Protocol):
    """A clock that can be led."""

    def adjust(self, later_s: float) -> None:
        """Have it show so much more, seconds; less if negative."""


def answer_clock(connection: socket.socket) -> None:
    """The head's part: answer until the other end is gone."""
    try:
        while connection.recv(1):
            connection.sendall(_READING.pack(time.monotonic()))
    except OSError:
        return


def _reach_clock() -> socket.socket:
    host, _, port = os.environ[AGENT_ADDRESS].rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=_PATIENCE_S)
    line = KeeperLine(connection, float(os.environ[SILENCE]))
    line.say(clock=True)
    # What is sent before the head listens for single bytes would be read as words.
    line.hear()
    return connection


class HeadClock:
    """The clock of the head, as seen from this process; on the head itself, or without one, this machine's."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self._line: socket.socket | None = None
        if not float(os.environ.get(SILENCE, "0")):
            return
        self._line = _reach_clock()
        self._seen = deque([self._ask()], maxlen=_REMEMBERED)
        self.offset_s = self._seen[0][1]

    def lead(self, clock: Adjustable) -> None:
        """Have a thread keep a clock of this machine in step with the head's."""
        if self._line is not None:
            threading.Thread(target=self._lead, args=(clock,), name="head-clock", daemon=True).start()

    def _lead(self, clock: Adjustable) -> None:
        while True:
            time.sleep(_EVERY_S)
            # A path that is out for a while is no reason to let the clock drift afterwards.
            with suppress(OSError):
                if self._line is None:
                    self._line = _reach_clock()
                self._follow(clock)
                continue
            if self._line is not None:
                self._line.close()
            self._line = None

    def _follow(self, clock: Adjustable) -> None:
        self._seen.append(self._ask())
        # Of the last minute, in which clocks drift by less than a round trip is uncertain.
        _, best_s = min(self._seen)
        step_s = best_s - self.offset_s
        step_s = math.copysign(min(abs(step_s), _MOST_STEP_S), step_s)
        self.offset_s += step_s
        clock.adjust(step_s)

    def _ask(self) -> tuple[float, float]:
        """Return the quickest of several round trips, and what the head's clock shows more than this one's; seconds."""
        assert self._line is not None
        found = []
        for _ in range(_ROUND_TRIPS):
            asked_s = time.monotonic()
            self._line.sendall(b"?")
            reading = self._line.recv(_READING.size, socket.MSG_WAITALL)
            if len(reading) < _READING.size:
                raise ConnectionError("the head is gone")
            answered_s = time.monotonic()
            (head_s,) = _READING.unpack(reading)
            found.append((answered_s - asked_s, head_s - (asked_s + answered_s) / 2))
        return min(found)
