"""How long messages of ranks take from this host to another one: starts a process at each end, and waits for both."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO, Any

from executor.core.subprocesses import python_environment
from traces.common.errors import RunError
from traces.probe.interval import Interval, interval_of
from traces.probe.peer import Peer

SERVICE = "messages"

# All of it, whatever the network does.
_MOST_S = 150.0

_START_S = 90.0


@dataclass(frozen=True, slots=True)
class MessageProfile:
    """Of gloo, over one connection that is in use.

    Attributes:
        arrival_s: For each size in bytes, from the sending of a message to its arrival, if its receive was posted
            before; seconds.
        notice_s: From the posting of a receive to the departure of a message that waits for it; seconds.
    """

    arrival_s: dict[int, Interval]
    notice_s: Interval


def can_measure_messages() -> bool:
    """Return whether this host has what it takes, which is torch."""
    return find_spec("torch") is not None


def measure_messages(peer: Peer, sizes_bytes: Sequence[int], repeats: Sequence[int]) -> MessageProfile:
    """Measure, with a responder that offers `SERVICE`.

    Args:
        peer: The session with it.
        sizes_bytes: Of messages, rising.
        repeats: Of each of the sizes in each of the rounds.

    Raises:
        RunError: The processes do not reach each other, or fail.
    """
    own = _plain(peer.own_host)
    orders = json.dumps({"sizes_bytes": list(sizes_bytes), "repeats": list(repeats)})
    with _probe("0", own, own, 0, orders) as lines:
        port = lines(_START_S).get("port")
        peer.ask(SERVICE, {"port": port})
        # If the other end fails it says so, and why, long before this one has waited for long enough.
        answer = peer.answer(_MOST_S + _START_S)
        found = lines(_START_S)
    if "times" not in found or answer.get("served") is not True:
        raise RunError("gloo's processes ended without a result")
    times = found["times"]
    # Whichever is quickest: the first messages of a process can take longer than larger ones after them.
    one_way_s = min(interval_of(taken).median for taken in times["posted_s"])
    return MessageProfile(
        {
            size_bytes: interval_of([max(0.0, taken_s) for taken_s in taken])
            for size_bytes, taken in zip(sizes_bytes, times["posted_s"], strict=True)
        },
        # The receive is posted a latency after the sending, and what it lets go takes a latency more.
        interval_of([max(0.0, taken_s - 2 * one_way_s) for taken_s in times["late_s"]]),
    )


def serve_messages(own_host: str, peer_host: str, message: dict[str, Any]) -> dict[str, Any]:
    """Answer a peer that measures; what a responder calls for `SERVICE`.

    Raises:
        RunError: The two processes do not reach each other.
    """
    port = message.get("port")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise RunError(f"no port: {str(port)[:40]}")
    with _probe("1", _plain(own_host), _plain(peer_host), port, "") as lines:
        return lines(_MOST_S)


def _plain(host: str) -> str:
    """An IPv4 address as such, where a socket for both kinds has it."""
    return host.removeprefix("::ffff:") if "." in host else host


@contextmanager
def _probe(
    rank: str, own_host: str, store_host: str, port: int, orders: str
) -> Iterator[Callable[[float], dict[str, Any]]]:
    """Start one of the two processes; give what returns its next message, and end it in any case."""
    command = [
        sys.executable,
        "-m",
        "executor.profiling.message_probe",
        str(os.getpid()),
        rank,
        own_host,
        store_host,
        str(port),
    ]
    pipe, known = subprocess.PIPE, python_environment()
    process = subprocess.Popen(command, env=known, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{orders}\n")
        process.stdin.close()
        heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, heard), daemon=True).start()
        yield lambda patience_s: _next(heard, patience_s)
    finally:
        process.kill()
        process.wait()


def _read(output: IO[str], heard: "queue.SimpleQueue[str]") -> None:
    with output:
        for line in output:
            heard.put(line)
    heard.put("")


def _next(heard: "queue.SimpleQueue[str]", patience_s: float) -> dict[str, Any]:
    try:
        line = heard.get(timeout=patience_s)
    except queue.Empty:
        raise RunError(f"gloo's messages took more than {patience_s:g} s") from None
    if not line:
        raise RunError("the process that sends gloo's messages ended without a word")
    message: dict[str, Any] = json.loads(line)
    if "failed" in message:
        raise RunError(f"gloo: {message['failed']}")
    return message
