"""The passive end of a measurement, which listens and serves one peer at a time."""

import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Self

from traces.common.errors import InputError
from traces.probe.bursts import MOST_CONNECTIONS
from traces.probe.conversation import Address, Conversation, PeerError
from traces.probe.session import Service, Session

# Limit on the wait for the first request of a new connection, seconds.
_GREETING_S = 5.0

# Largest number of connections that have not sent their first request.
_MOST_NEW = 64

# Limit on the wait for a session to end whose peer has left, seconds.
_LEAVING_S = 0.5

# Limit on the wait for a session to end whose peer asks for a new session in its place, seconds.
_REPLACING_S = 10.0


class Responder:
    """A responder that listens at one address; a context manager that closes it.

    Args:
        services: Services by the names that peers ask for, besides echoes and bursts.
        tell: Called with a line for each session.

    Raises:
        InputError: The responder cannot listen at the address.
    """

    def __init__(self, address: Address, services: Mapping[str, Service], tell: Callable[[str], None]) -> None:
        self.address = address
        self._services = services
        self._tell = tell
        self._new = threading.BoundedSemaphore(_MOST_NEW)
        self._serving = threading.Lock()
        self._session: Session | None = None

    def __enter__(self) -> Self:
        self._listening = _listen(self.address)
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            # Without this, `accept` in another thread would not return.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        if (session := self._session) is not None:
            session.end()

    def serve(self) -> None:
        """Serve until the responder is closed, or this thread is interrupted."""
        while True:
            try:
                connection, (host, *_) = self._listening.accept()
            except OSError:
                # The responder is closed, or the peer has closed the connection already.
                if self._listening.fileno() < 0:
                    return
                continue
            if not self._new.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._receive, args=(connection, host), daemon=True).start()

    def _receive(self, connection: socket.socket, host: str) -> None:
        """Receive the first request of a new connection, and serve the connection."""
        # The peer may close the connection at any time.
        with suppress(PeerError, OSError), ExitStack() as stack:
            stack.callback(connection.close)
            try:
                conversation = Conversation(connection, _GREETING_S, host)
                conversation.greet()
                request = conversation.receive_json()
            finally:
                self._new.release()
            if request.get("want") == "session":
                self._measure(conversation, host, self._session_of(request.get("replaces")))
            elif (session := self._session_of(request.get("join"))) is not None and session.join(conversation):
                # The session owns the connection from now on.
                stack.pop_all()

    def _session_of(self, token: object) -> Session | None:
        """Return the current session if ``token`` is its token, None otherwise."""
        session = self._session
        given = str(token).encode(errors="replace")
        return session if session is not None and hmac.compare_digest(given, session.token.encode()) else None

    def _measure(self, conversation: Conversation, host: str, replaced: Session | None) -> None:
        if replaced is not None:
            # The peer has given this session up; this end might notice the broken connection only much later.
            replaced.end()
        if not self._serving.acquire(timeout=_LEAVING_S if replaced is None else _REPLACING_S):
            conversation.send_json({"busy": True})
            return
        try:
            session = self._session = Session(conversation, secrets.token_hex(16), self._services)
            try:
                session.serve()
            finally:
                self._session = None
                session.end()
                self._tell(f"{host} measured: {session.received_bytes:,} bytes from there, {session.sent_bytes:,} back")
        finally:
            self._serving.release()


def _listen(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, place = found[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(
            f"cannot listen at {address}: {error.strerror}", valid="give an address that this host has"
        ) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(2 * MOST_CONNECTIONS)
    except OSError as error:
        listening.close()
        raise InputError(
            f"cannot listen at {address}: {error.strerror}", valid="give an address of this host and a free port"
        ) from error
    return listening
