"""Measures how long gloo's messages take from this host to another one, with one process on each host."""

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
from traces.probe.peer import Peer
from traces.statistics import Interval, interval_of

# Name under which a responder, `traces.probe.responder`, offers `serve_messages`.
SERVICE = "messages"

# Time limits: for the whole measurement, and for the start of a process.
_MEASURING_S = 150.0
_START_S = 90.0


@dataclass(frozen=True, slots=True)
class MessageProfile:
    """Times of gloo's messages over an open connection.

    Attributes:
        arrival_s: Dictionary of message sizes in bytes to seconds from the send to the arrival, if the receive was
            posted before the send.
        notice_s: Seconds from posting a receive to the departure of a message that has waited for the receive.
    """

    arrival_s: dict[int, Interval]
    notice_s: Interval


def can_measure_messages() -> bool:
    """Return whether this host has torch, which the measurement needs."""
    return find_spec("torch") is not None


def measure_messages(peer: Peer, sizes_bytes: Sequence[int], repeats: Sequence[int]) -> MessageProfile:
    """Measure messages to a responder that offers `SERVICE`; ``repeats`` is how many of each size a round has.

    Raises:
        RunError: The processes do not reach each other, or fail.
    """
    own = _without_prefix(peer.own_host)
    sizes = json.dumps(list(zip(sizes_bytes, repeats, strict=True)))
    with _probe("0", own, own, 0, sizes) as next_message:
        port = next_message(_START_S).get("port")
        peer.ask(SERVICE, {"port": port})
        # If the other process fails, its answer has the reason, and comes before the messages here time out.
        answer = peer.answer(_MEASURING_S + _START_S)
        found = next_message(_START_S)
    if "times" not in found or answer.get("served") is not True:
        raise RunError("gloo's messages cannot be measured: one of the two processes ended without a result")
    times = found["times"]
    # Of the fastest size, since the first messages of a process can take longer than larger ones later.
    one_way_s = min(interval_of(taken).median for taken in times["posted_s"])
    return MessageProfile(
        {
            size_bytes: interval_of([max(0.0, taken_s) for taken_s in taken])
            for size_bytes, taken in zip(sizes_bytes, times["posted_s"], strict=True)
        },
        # Subtract two latencies: the receive is posted one after the send, and the message then travels for another.
        interval_of([max(0.0, taken_s - 2 * one_way_s) for taken_s in times["late_s"]]),
    )


def serve_messages(own_host: str, peer_host: str, message: dict[str, Any]) -> dict[str, Any]:
    """Run the measurement's process on the responder's host; return its answer, or raise `RunError` if it fails."""
    port = message.get("port")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise RunError(f"port: {str(port)[:40]} is not a port; it must be a whole number from 1 to 65535")
    with _probe("1", _without_prefix(own_host), _without_prefix(peer_host), port, "") as next_message:
        return next_message(_MEASURING_S)


def _without_prefix(host: str) -> str:
    """Return an address without the prefix ``::ffff:``, which a dual-stack socket adds to IPv4 addresses."""
    return host.removeprefix("::ffff:") if "." in host else host


@contextmanager
def _probe(
    rank: str, own_host: str, store_host: str, port: int, sizes: str
) -> Iterator[Callable[[float], dict[str, Any]]]:
    """Run one of the two processes during the context.

    Yields:
        A function that returns the process's next message; its argument is a timeout in seconds.
    """
    module = "executor.profiling.message_probe"
    command = [sys.executable, "-m", module, str(os.getpid()), rank, own_host, store_host, str(port)]
    process = subprocess.Popen(
        command,
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{sizes}\n")
        process.stdin.close()
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        yield lambda timeout_s: _next(lines, timeout_s)
    finally:
        process.kill()
        process.wait()


def _read(output: IO[str], lines: "queue.SimpleQueue[str]") -> None:
    with output:
        for line in output:
            lines.put(line)
    lines.put("")


def _next(lines: "queue.SimpleQueue[str]", timeout_s: float) -> dict[str, Any]:
    try:
        line = lines.get(timeout=timeout_s)
    except queue.Empty:
        raise RunError(f"gloo's messages took more than {timeout_s:g} s, the limit of a measurement") from None
    if not line:
        raise RunError("the process that sends gloo's messages ended without an answer; does 'import torch' work?")
    message: dict[str, Any] = json.loads(line)
    if "failed" in message:
        raise RunError(f"gloo: {message['failed']}")
    return message
