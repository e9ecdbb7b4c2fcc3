"""The protocol of a measurement: a greeting, then JSON objects, each prefixed by its length."""

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

from traces.common.errors import InputError, RunError

DEFAULT_PORT = 7117

_VALID = "write HOST or HOST:PORT, an IPv6 address in brackets, for example '10.0.0.5:7117' or '[fd00::5]:7117'"


@dataclass(frozen=True, slots=True)
class Address:
    """A host, by name or IP address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> Address:
    """Return the address in a text; the port is ``default_port`` where none is given.

    Raises:
        InputError: The text is not an address.
    """
    host, port = _split(text.strip())
    if not host or any(each.isspace() for each in host) or not _is_name(host):
        raise InputError(f"'{text}' is not an address", valid=_VALID)
    if not port:
        return Address(host, default_port)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise InputError(f"'{port}' in '{text}' is not a port", valid="a port is a number from 1 to 65535")
    return Address(host, int(port))


def _is_name(host: str) -> bool:
    """Return whether a host name can be looked up: no label of it is empty or too long."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _split(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or rest == ":":
            return "", ""
        return host, rest[1:]
    if text.count(":") > 1:
        return text, ""
    host, colon, port = text.partition(":")
    return (host, port) if port or not colon else ("", "")


GREETING = b"ropebridge-probe 1\n"

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 20


class PeerError(RunError):
    """The other end closed the connection, did not answer in time, or sent something invalid."""


class UnknownPeerError(PeerError):
    """The other end does not speak this protocol."""


class Conversation:
    """One connection on which both ends send messages in turn.

    Args:
        connection: The connected socket; the caller closes it.
        timeout_s: Longest wait for data from the other end, seconds.
        peer: Name of the other end, for messages.

    Raises:
        PeerError: By all methods: the other end closed the connection, did not answer in time, refused, or sent
            something invalid.
    """

    def __init__(self, connection: socket.socket, timeout_s: float, peer: str) -> None:
        self.connection = connection
        self._peer = peer
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self) -> None:
        """Exchange greetings.

        Raises:
            UnknownPeerError: The other end sends something else, or nothing.
        """
        self.send_bytes(GREETING)
        received = b""
        while len(received) < len(GREETING):
            try:
                more = self._receive(len(GREETING) - len(received))
            except TimeoutError as error:
                raise UnknownPeerError("sends nothing") from error
            received += more
            if not GREETING.startswith(received):
                raise UnknownPeerError(f"starts with {received!r}")

    def send_json(self, message: dict[str, Any]) -> None:
        """Send an object."""
        text = json.dumps(message).encode()
        assert len(text) <= _MOST_BYTES, "the sender keeps messages short"
        self.send_bytes(_LENGTH.pack(len(text)) + text)

    def receive_json(self) -> dict[str, Any]:
        """Receive and return a JSON object."""
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        if length > _MOST_BYTES:
            raise PeerError(f"{self._peer} announced a message of {length:,} bytes")
        try:
            message = json.loads(self.receive_bytes(length))
        except (ValueError, RecursionError) as error:
            raise PeerError(f"{self._peer} sent a message that is not JSON") from error
        if not isinstance(message, dict):
            raise PeerError(f"{self._peer} sent a message that is not a JSON object")
        if "refused" in message:
            raise PeerError(f"{self._peer} refused: {str(message['refused'])[:200]}")
        return message

    def receive_bytes(self, count: int) -> bytes:
        """Receive and return exactly ``count`` bytes."""
        received = bytearray()
        while len(received) < count:
            try:
                received += self._receive(count - len(received))
            except TimeoutError as error:
                raise PeerError(f"{self._peer} was silent for {self.connection.gettimeout():g} s") from error
        return bytes(received)

    def send_bytes(self, data: bytes) -> None:
        """Send bytes without a length prefix."""
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise PeerError(f"{self._peer} closed the connection: {error.strerror or error}") from error

    def _receive(self, most: int) -> bytes:
        try:
            data = self.connection.recv(most)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerError(f"{self._peer} closed the connection: {error.strerror or error}") from error
        if not data:
            raise PeerError(f"{self._peer} closed the connection")
        return data
