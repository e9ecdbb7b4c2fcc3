"""The control channel between a process of a job and its head: JSON lines, after mutual authentication.

Every job has a random key in a file with mode 0600; the key is never sent. Three messages authenticate both ends:

1. the connecting process (the client) sends its role and a nonce, a random number;
2. the head sends a nonce of its own and an HMAC-SHA256, with the key, of ``head`` and both nonces;
3. the client checks this HMAC, and sends the HMAC of its own role and both nonces.

Neither end sends or accepts anything else before. executor/control/control_server.py lists the messages that follow.
"""

import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from executor.core.timeouts import timeouts
from traces.common.errors import RunError

Message = dict[str, Any]

# Roles of the ends of a channel. An end's role is part of its proof, so that a proof cannot be sent back to its sender.
HEAD, AGENT, RANK = "head", "agent", "rank"

# Environment variable of a rank: JSON list of the head's host, its port, and the longest silence allowed in seconds.
HEAD_ADDRESS = "ROPEBRIDGE_HEAD"

# The longest line in bytes, before and after authentication. The longest messages contain a scenario with traces.
UNPROVED_LINE_BYTES = 4096
LINE_BYTES = 1 << 26

_NONCE_BYTES = 32
_BACKLOG = 1024
_KEEPALIVE_PROBES = 3


def new_key() -> bytes:
    """Return a random key for a job."""
    return secrets.token_bytes(_NONCE_BYTES)


def write_key(path: Path, key: bytes) -> None:
    """Write a job's key into a file that its owner alone can read."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.hex())


def read_key(path: Path) -> bytes:
    """Return the key in a file that `write_key` wrote."""
    return bytes.fromhex(path.read_text())


def new_nonce() -> str:
    """Return a random number for one connection, in hexadecimal."""
    return secrets.token_hex(_NONCE_BYTES)


def prove(key: bytes, role: str, nonce: str, head_nonce: str) -> str:
    """Return the proof that an end knows the key: the HMAC-SHA256 of its role and both nonces, in hexadecimal.

    ``role`` is the role of this end: `HEAD`, `AGENT` or `RANK`. ``nonce`` is the random number of the client.
    """
    return hmac.new(key, f"ropebridge {role} {nonce} {head_nonce}".encode(), "sha256").hexdigest()


def is_nonce(value: object) -> bool:
    """Return whether a received value has the form of a nonce."""
    return isinstance(value, str) and len(value) == 2 * _NONCE_BYTES and value.isascii()


def is_proof(value: object, expected: str) -> bool:
    """Return whether a received value is the expected proof; takes equally long for every wrong value."""
    return isinstance(value, str) and hmac.compare_digest(value.encode(), expected.encode())


def encode(message: Message) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes | bytearray) -> Message | None:
    """Return the message in a line; None if the line is not a JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens at one address of this host only.

    Args:
        address: Host (a name, an IPv4 or an IPv6 address) and port; port 0 lets the system choose a free one.

    Raises:
        OSError: This host does not have the address, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=_BACKLOG)


def tune(connection: socket.socket, silence_s: float) -> None:
    """Turn off Nagle's algorithm, and have the kernel end a connection whose remote host does not answer.

    ``silence_s`` is the longest time without an answer, in seconds; 0 if the other end is on this host.
    """
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not silence_s:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        interval_s = max(1, round(silence_s / (_KEEPALIVE_PROBES + 1)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence_s))


class Channel:
    """The end of a control channel that belongs to an agent or a rank."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send a message; safe in any thread. A lost connection raises no error, but makes `receive` return None."""
        message = {"kind": kind, **fields, **({"payload_bytes": len(payload)} if payload else {})}
        self.send_plain(message, payload)

    def send_plain(self, message: Message, payload: bytes = b"") -> None:
        """Send a message without adding ``kind`` or ``payload_bytes``."""
        with self._sending, suppress(OSError):
            self._connection.sendall(encode(message) + payload)

    def receive(self, limit: int = LINE_BYTES) -> Message | None:
        """Return the next message; None if the connection is closed or the line is not a JSON object."""
        try:
            line = self._lines.readline(limit)
        except (OSError, ValueError):
            return None
        return decode(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close the channel; a `receive` that waits in another thread returns None."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()


class UnprovedHeadError(RunError):
    """The process that listens at the head's address does not know this job's key."""


def _connect(address: tuple[str, int], role: str, key: bytes, silence_s: float) -> Channel:
    """Return an authenticated channel to the head."""
    limit_s = timeouts().proof_s
    connection = socket.create_connection(address, timeout=limit_s)
    channel = Channel(connection)
    nonce = new_nonce()
    channel.send_plain({"role": role, "nonce": nonce})
    answer = channel.receive(UNPROVED_LINE_BYTES)
    if answer is None:
        channel.close()
        raise ConnectionError("the connection was closed before the head proved itself")
    head_nonce = answer.get("nonce")
    if not is_nonce(head_nonce) or not is_proof(answer.get("proof"), prove(key, HEAD, nonce, str(head_nonce))):
        channel.close()
        raise UnprovedHeadError(
            f"{address[0]}:{address[1]}: the process that listens there does not know this job's key; the head's "
            "address and port must be those of this job's head, not of another job's"
        )
    channel.send_plain({"proof": prove(key, role, nonce, str(head_nonce))})
    connection.settimeout(None)
    tune(connection, silence_s)
    return channel


def reach_head(address: tuple[str, int], role: str, key: bytes, silence_s: float, wait_s: float) -> Channel:
    """Return an authenticated channel to the head; retry, since the head may start later than this process.

    Args:
        address: Host and port of the control server.
        role: `AGENT` or `RANK`.
        key: The key of the job.
        silence_s: How long the head's host may not answer, in seconds; 0 if the head is on this host.
        wait_s: How long to retry, in seconds.

    Raises:
        UnprovedHeadError: A process without the job's key listens at the address.
        RunError: No connection could be made.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            return _connect(address, role, key, silence_s)
        except UnprovedHeadError:
            if time.monotonic() > until_s:
                raise
        except OSError as error:
            if time.monotonic() > until_s:
                reason = error.strerror or error
                raise RunError(f"the job's head at {address[0]}:{address[1]} cannot be reached: {reason}") from error
        time.sleep(min(timeouts().retry_s, max(0.0, until_s - time.monotonic())))
