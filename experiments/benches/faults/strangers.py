"""What a stranger does who reaches a job's ports, but has no key.

As a program, ``python -m experiments.benches.faults.strangers PLACES`` tries everything at all places, a JSON list of
pairs of an address and a port, again and again, until it is terminated. It prints a line before it begins, and how much
it has tried at each place when it ends. It does so when nothing else wants the processor, so that it takes only what
the job itself spends on strangers.
"""

# Looking up an address loads it, which another user may not be able to do.
import encodings.idna  # noqa: F401
import json
import os
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

from executor.core.control_channel import encode, new_key
from executor.core.tls import UNPROVED_BYTES, TlsEnd, identity

Place = tuple[str, int]

# The user as which strangers come, if this one may become another.
NOBODY = 65534

# The head lets strangers wait for one another.
_SOON_S = 10.0

# Connections that wait in vain while a stranger tries something.
_IDLE = 50

_RANK = {"kind": "hello", "rank": 1, "incarnation": 0}
_AGENT = {"kind": "hello", "host": "there"}
_ORDERS = (
    {"kind": "over", "status": 1, "reason": "a stranger says so"},
    {"kind": "signal", "rank": 0, "number": 9},
    {"kind": "failed", "reason": "a stranger says so"},
    {"kind": "ended", "rank": 0, "incarnation": 0, "status": 1, "failure": None, "stuck": "", "printed": ""},
)
_FILE = {"kind": "file", "file": "parameters", "payload_bytes": 4}


def _lines(*messages: dict[str, Any]) -> bytes:
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
    """Do the same with whoever answers, after a handshake without a certificate, or with that of another key."""
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
    """Send a handshake one byte at a time."""
    with suppress(OSError), socket.create_connection(place, timeout=_SOON_S) as connection:
        for byte in TlsEnd(new_key(), is_server=False).begin()[:100]:
            connection.sendall(bytes([byte]))
    return b""


def _speak_own_tls(place: Place) -> bytes:
    """Do what somebody with the key of another job does."""
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


def become_nobody() -> None:
    """Become another user, if this one may."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def main(places: str) -> None:
    """Try everything at all places for ever."""
    become_nobody()
    tempfile.tempdir = "/tmp"
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Threads inherit that this one alone hears of its end.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    known = [(str(address), int(port)) for address, port in json.loads(places)]
    tried = dict.fromkeys(known, 0)
    print("ready", flush=True)
    for place in known:
        # At once, since most places let whoever comes wait until he gives up.
        Thread(target=_attack, args=(place, tried), daemon=True).start()
    signal.sigwait({signal.SIGTERM})
    print(json.dumps(list(tried.values())), flush=True)
    os._exit(0)


def _attack(place: Place, tried: dict[Place, int]) -> None:
    while True:
        waiting = []
        for _ in range(_IDLE):
            with suppress(OSError):
                waiting.append(socket.create_connection(place, timeout=1.0))
        for way in WAYS.values():
            way(place)
            tried[place] += 1
        for connection in waiting:
            connection.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
