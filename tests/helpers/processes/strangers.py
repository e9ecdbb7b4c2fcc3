"""What a stranger does who reaches a job's ports: as another user of the machine if the tests may become one.

The process of `attack` writes what it has heard as JSON to its standard output.
"""

# Python loads it with the first address, when this process may be unable to read it.
import encodings.idna  # noqa: F401
import json
import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress

from executor.core.control_channel import encode, new_key
from executor.core.tls import UNPROVED_BYTES, TlsEnd, identity

Place = tuple[str, int]

NOBODY = 65534
IDLE = 300
HALF_OPEN = 100

# The head lets strangers wait for one another.
_SOON_S = 10.0
# Long enough for loopback: connections to gloo get no answer at all.
_CONNECT_S = 0.3

_RANK = {"kind": "hello", "rank": 1, "incarnation": 0}
_AGENT = {"kind": "hello", "host": "there"}
_ORDERS = (
    {"kind": "over", "status": 1, "reason": "a stranger says so"},
    {"kind": "signal", "rank": 0, "number": 9},
    {"kind": "failed", "reason": "a stranger says so"},
    {"kind": "ended", "rank": 0, "incarnation": 0, "status": 1, "failure": None, "stuck": "", "printed": ""},
)
_FILE = {"kind": "file", "file": "parameters", "payload_bytes": 4}


def _lines(*messages: dict[str, object]) -> bytes:
    return b"".join(map(encode, messages))


def _say(place: Place, words: bytes) -> bytes:
    """Say something; return what is answered until the other end closes the connection, or nothing more comes."""
    heard = bytearray()
    with suppress(OSError), socket.create_connection(place, timeout=_SOON_S) as connection:
        connection.sendall(words)
        while said := connection.recv(1 << 16):
            heard += said
    return bytes(heard)


def _say_in_tls(place: Place, words: bytes, *, with_certificate: bool) -> bytes:
    """The same to whoever answers, after a handshake without a certificate, or with that of another key."""
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    if with_certificate:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(identity(new_key()).pem)
            file.flush()
            anybody.load_cert_chain(file.name)
    heard = bytearray()
    with suppress(OSError), anybody.wrap_socket(socket.create_connection(place, timeout=_SOON_S)) as connection:
        connection.sendall(words)
        while said := connection.recv(1 << 16):
            heard += said
    return bytes(heard)


def _trickle(place: Place) -> bytes:
    """A handshake that comes one byte at a time."""
    with suppress(OSError), socket.create_connection(place, timeout=_SOON_S) as connection:
        for byte in TlsEnd(new_key(), is_server=False).begin()[:100]:
            connection.sendall(bytes([byte]))
    return b""


def _speak_own_tls(place: Place) -> bytes:
    """What somebody with the key of another job does."""
    with suppress(OSError), socket.create_connection(place, timeout=_SOON_S) as connection:
        own = TlsEnd(new_key(), is_server=False)
        connection.sendall(own.begin())
        return own.receive(connection.recv(1 << 16))
    return b""


WAYS: dict[str, Callable[[Place], bytes]] = {
    "join as a rank without a key": lambda place: _say(place, _lines(_RANK, {"kind": "ready"})),
    "join as a host without a key": lambda place: _say(place, _lines(_AGENT)),
    "join with the key of another job": _speak_own_tls,
    "join with another certificate": lambda place: _say_in_tls(place, _lines(_RANK), with_certificate=True),
    "read, without a certificate": lambda place: _say_in_tls(place, _lines(_RANK), with_certificate=False),
    "write a file": lambda place: _say_in_tls(place, _lines(_RANK, _FILE) + b"evil", with_certificate=True),
    "stop the job": lambda place: _say_in_tls(place, _lines(_AGENT, *_ORDERS), with_certificate=True),
    "speak as the ranks' supervisor": lambda place: _say(place, _lines(*_ORDERS)),
    "garbage": lambda place: _say(place, os.urandom(4096)),
    "a record that is too long": lambda place: _say(place, b"\x16\x03\x01\xff\xff" + bytes(1 << 16)),
    "a line that is too long": lambda place: _say(place, b"x" * (4 * UNPROVED_BYTES)),
    "a handshake byte by byte": _trickle,
    "HTTP": lambda place: _say(place, b"GET / HTTP/1.1\r\n\r\n"),
}


def attack(places: Collection[Place], files: Collection[str], processes: Collection[int]) -> None:
    """Try all ways at all places, while idle and half-open connections wait; then signals, and the job's files.

    Args:
        places: Where the job listens.
        files: The job's files.
        processes: The job's processes.
    """
    # Those that pytest captures go nowhere.
    sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    tempfile.tempdir = "/tmp"
    heard: dict[str, list[str]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        hello = TlsEnd(b"guess", is_server=False).begin()
        open_places = [place for place in places if _connected(place, stack) is not None]
        for place in open_places:
            for number in range(IDLE + HALF_OPEN):
                connection = _connected(place, stack)
                if number >= IDLE and connection is not None:
                    with suppress(OSError):
                        connection.sendall(hello)
            for name, way in WAYS.items():
                heard[name].append(way(place).hex())
    reached = []
    if os.geteuid() == NOBODY:
        for process in processes:
            with suppress(PermissionError):
                os.kill(process, 0)
                reached.append(process)
    read = [path for path in files if os.geteuid() == NOBODY and os.access(path, os.R_OK)]
    print(json.dumps({"heard": heard, "open": open_places, "signalled": reached, "read": read}), flush=True)


def _connected(place: Place, stack: ExitStack) -> socket.socket | None:
    try:
        return stack.enter_context(socket.create_connection(place, timeout=_CONNECT_S))
    except OSError:
        return None
