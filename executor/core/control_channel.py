"""The control channel between a process of a job and its head: JSON lines over TLS, with a key that both ends know.

Every job has a random key in a file with mode 0600; the key is never sent. Both ends prove that they know it
(executor/core/tls.py) before either sends or accepts anything else. executor/control/control_server.py lists the
messages that follow.
"""

import io
import json
import secrets
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from executor.core.timeouts import timeouts
from executor.core.tls import TlsEnd
from traces.common.atomic import write_private_text
from traces.common.errors import RunError
from traces.common.text import read_regular

Message = dict[str, Any]

# What the client of a channel is.
AGENT, RANK = "agent", "rank"

# Environment variable of a rank: JSON list of the head's host, its port, and the longest silence allowed in seconds.
HEAD_ADDRESS = "ROPEBRIDGE_HEAD"

# The longest line in bytes. The longest messages contain a scenario with traces.
LINE_BYTES = 1 << 26

_KEY_BYTES = 32
_RECEIVE_BYTES = 1 << 18
_BACKLOG = 1024
_KEEPALIVE_PROBES = 3


def new_key() -> bytes:
    """Return a random key for a job."""
    return secrets.token_bytes(_KEY_BYTES)


def write_key(path: Path, key: bytes) -> None:
    """Write a job's key into a file that its owner alone can read."""
    write_private_text(path, key.hex())


def read_key(path: Path) -> bytes:
    """Return the key in a file that `write_key` wrote."""
    return bytes.fromhex(read_regular(path).decode())


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
    """The end of a control channel that belongs to an agent or a rank.

    Args:
        connection: The connection to the head.
        tls: This end of TLS, whose handshake is done; None between processes that have inherited their connection.
        said: What the other end has said during the handshake.
    """

    def __init__(self, connection: socket.socket, tls: TlsEnd | None = None, said: bytes = b"") -> None:
        self._connection = connection
        self._tls = tls
        self._lines = connection.makefile("rb") if tls is None else _decrypted(connection, tls, said)
        self._sending = threading.Lock()

    @property
    def own_address(self) -> str:
        """The address of this end of the connection, at which hosts can reach this one that the other end can reach."""
        return str(self._connection.getsockname()[0])

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Send a message; safe in any thread. A lost connection raises no error, but makes `receive` return None."""
        message = {"kind": kind, **fields, **({"payload_bytes": len(payload)} if payload else {})}
        self.send_plain(message, payload)

    def send_plain(self, message: Message, payload: bytes = b"") -> None:
        """Send a message without adding ``kind`` or ``payload_bytes``."""
        said = encode(message) + payload
        with self._sending, suppress(OSError):
            self._connection.sendall(said if self._tls is None else self._tls.send(said))

    def receive_payload(self, size_bytes: int) -> bytes | None:
        """Return the bytes that follow the message received last; None if the connection is closed before."""
        try:
            payload = self._lines.read(size_bytes)
        except (OSError, ValueError):
            return None
        return payload if len(payload) == size_bytes else None

    def receive(self) -> Message | None:
        """Return the next message; None if the connection is closed or the line is not a JSON object."""
        try:
            line = self._lines.readline(LINE_BYTES)
        except (OSError, ValueError):
            return None
        return decode(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Close the channel; a `receive` that waits in another thread returns None."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()


class _Decrypted(io.RawIOBase):
    """What the other end of a TLS connection has said, as a stream of bytes."""

    def __init__(self, connection: socket.socket, tls: TlsEnd, said: bytes) -> None:
        self._connection = connection
        self._tls = tls
        self._said = said

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; return the number of bytes, 0 at the end of the connection."""
        while not self._said:
            received = self._connection.recv(_RECEIVE_BYTES)
            if not received:
                return 0
            self._said = self._tls.receive(received)
        count = min(len(buffer), len(self._said))
        buffer[:count], self._said = self._said[:count], self._said[count:]
        return count


def _decrypted(connection: socket.socket, tls: TlsEnd, said: bytes) -> io.BufferedReader:
    return io.BufferedReader(_Decrypted(connection, tls, said), _RECEIVE_BYTES)


class UnprovedHeadError(RunError):
    """The process that listens at the head's address does not know this job's key."""


def _connect(address: tuple[str, int], key: bytes, silence_s: float) -> Channel:
    """Return an authenticated channel to the head."""
    connection = socket.create_connection(address, timeout=timeouts().proof_s)
    tls = TlsEnd(key, is_server=False)
    try:
        connection.sendall(tls.begin())
        if _shake_hands(connection, tls):
            raise ssl.SSLError("the head speaks before an agent or a rank has")
    except ssl.SSLError as error:
        connection.close()
        raise UnprovedHeadError(
            f"{address[0]}:{address[1]}: the process that listens there does not know this job's key; the head's "
            "address and port must be those of this job's head, not of another job's"
        ) from error
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    tune(connection, silence_s)
    return Channel(connection, tls)


def _shake_hands(connection: socket.socket, tls: TlsEnd) -> bytes:
    """Prove to each other that both ends know the key; return what the other end has said meanwhile."""
    until_s, said = time.monotonic() + timeouts().proof_s, b""
    while not tls.is_proved:
        # Whoever is there may send one byte at a time.
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        received = connection.recv(_RECEIVE_BYTES)
        if not received:
            raise ConnectionError("the connection was closed before the other end proved itself")
        said += tls.receive(received)
        connection.sendall(tls.take())
    return said


def accept(connection: socket.socket, key: bytes) -> Channel:
    """Return an authenticated channel to a process that has connected to this one.

    Raises:
        OSError: The process does not know the key, or has gone.
    """
    tls = TlsEnd(key, is_server=True)
    said = _shake_hands(connection, tls)
    connection.settimeout(None)
    tune(connection, 0.0)
    return Channel(connection, tls, said)


def reach_head(
    address: tuple[str, int], key: bytes, silence_s: float, wait_s: float, name: str = "the job's head"
) -> Channel:
    """Return an authenticated channel to the head; retry, since the head may start later than this process.

    Args:
        address: Host and port of the control server.
        key: The key of the job.
        silence_s: How long the head's host may not answer, in seconds; 0 if the head is on this host.
        wait_s: How long to retry, in seconds.
        name: Name of the head, or of another process that listens, for messages.

    Raises:
        UnprovedHeadError: A process without the job's key listens at the address.
        RunError: No connection could be made.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            return _connect(address, key, silence_s)
        except UnprovedHeadError:
            if time.monotonic() > until_s:
                raise
        except OSError as error:
            if time.monotonic() > until_s:
                reason = error.strerror or error
                raise RunError(f"{name} at {address[0]}:{address[1]} cannot be reached: {reason}") from error
        time.sleep(min(timeouts().retry_s, max(0.0, until_s - time.monotonic())))
