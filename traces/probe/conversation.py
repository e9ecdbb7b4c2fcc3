"""What the two ends of a measurement say to each other: a greeting, then JSON objects, each after its length."""

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
    """A host, by name or number, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return what a person wrote; the port is `DEFAULT_PORT` where none is given.

    Raises:
        InputError: This is no address.
    """
    host, port = _split(text.strip())
    if not host or any(each.isspace() for each in host) or not _is_name(host):
        raise InputError(f"'{text}' is no address", valid=_VALID)
    if not port:
        return Address(host, DEFAULT_PORT)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise InputError(f"'{port}' in '{text}' is no port", valid="a port is a number from 1 to 65535")
    return Address(host, int(port))


def _is_name(host: str) -> bool:
    """Whether it can be looked up: no part of it is empty or longer than names in a network are."""
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
    """The other end hung up, went silent, or said something that makes no sense."""


class StrangerError(PeerError):
    """The other end is no part of a measurement."""


class Conversation:
    """One connection on which both ends speak in turn.

    Args:
        connection: Connected; closed by who made it.
        silence_s: How long the other end may take for its part, seconds.
        whom: The other end, for messages.
    """

    def __init__(self, connection: socket.socket, silence_s: float, whom: str) -> None:
        self.connection = connection
        self._whom = whom
        connection.settimeout(silence_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self) -> None:
        """Exchange greetings.

        Raises:
            StrangerError: The other end says something else, or nothing.
            PeerError: It hung up.
        """
        self._send(GREETING)
        heard = b""
        while len(heard) < len(GREETING):
            try:
                more = self._receive(len(GREETING) - len(heard))
            except TimeoutError as error:
                raise StrangerError("says nothing") from error
            heard += more
            if not GREETING.startswith(heard):
                raise StrangerError(f"starts with {heard!r}")

    def say(self, message: dict[str, Any]) -> None:
        """Send an object.

        Raises:
            PeerError: The other end has hung up.
        """
        text = json.dumps(message).encode()
        assert len(text) <= _MOST_BYTES, "whoever says this keeps it short"
        self._send(_LENGTH.pack(len(text)) + text)

    def hear(self) -> dict[str, Any]:
        """Return the object that the other end sends.

        Raises:
            PeerError: It hung up, was silent for too long, refuses, or sent something else.
        """
        (length,) = _LENGTH.unpack(self.exactly(_LENGTH.size))
        if length > _MOST_BYTES:
            raise PeerError(f"{self._whom} announced a message of {length:,} bytes")
        try:
            message = json.loads(self.exactly(length))
        except (ValueError, RecursionError) as error:
            raise PeerError(f"{self._whom} sent a message that is no JSON") from error
        if not isinstance(message, dict):
            raise PeerError(f"{self._whom} sent a message that is no JSON object")
        if "refused" in message:
            raise PeerError(f"{self._whom} refused: {str(message['refused'])[:200]}")
        return message

    def exactly(self, count: int) -> bytes:
        """Return so many bytes.

        Raises:
            PeerError: The other end hung up or was silent for too long before that.
        """
        heard = bytearray()
        while len(heard) < count:
            try:
                heard += self._receive(count - len(heard))
            except TimeoutError as error:
                raise PeerError(f"{self._whom} was silent for {self.connection.gettimeout():g} s") from error
        return bytes(heard)

    def send(self, data: bytes) -> None:
        """Send bytes as they are.

        Raises:
            PeerError: The other end has hung up.
        """
        self._send(data)

    def _send(self, data: bytes) -> None:
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise PeerError(f"{self._whom} hung up: {error.strerror or error}") from error

    def _receive(self, most: int) -> bytes:
        try:
            data = self.connection.recv(most)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerError(f"{self._whom} hung up: {error.strerror or error}") from error
        if not data:
            raise PeerError(f"{self._whom} hung up")
        return data
