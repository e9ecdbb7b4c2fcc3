"""A responder's session with one peer: it carries out echoes, bursts and further services."""

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from traces.common.errors import RopebridgeError
from traces.probe.bursts import MOST_CONNECTIONS, close_at_once, parse_request, receive_burst, send_burst
from traces.probe.conversation import Conversation, PeerError

# Longest wait for a peer's next request, seconds.
REQUEST_TIMEOUT_S = 30.0

ECHO_BYTES = 8
MOST_ECHOES = 10_000

_JOINING_S = 10.0

Service = Callable[[str, str, dict[str, Any]], dict[str, Any]]
"""Called with the responder's address, the peer's address and the request; returns the answer."""


class Session:
    """A session with one peer, which lasts until the peer closes it or `end` is called.

    Args:
        conversation: Conversation with the peer, after the greeting.
        token: Random token by which further connections of the peer join the session.
    """

    def __init__(self, conversation: Conversation, token: str, services: Mapping[str, Service]) -> None:
        self.token = token
        self.sent_bytes = self.received_bytes = 0
        self._conversation = conversation
        self._services = services
        self._joined: queue.Queue[Conversation] = queue.Queue(MOST_CONNECTIONS)
        self._ending = threading.Lock()
        self._over = False
        self._bursting: list[socket.socket] = []

    def join(self, conversation: Conversation) -> bool:
        """Add a further connection of the peer; return whether there is room for it."""
        with self._ending:
            if self._over:
                return False
            try:
                self._joined.put_nowait(conversation)
            except queue.Full:
                return False
        with suppress(PeerError):
            conversation.send_json({"joined": True})
        return True

    def end(self) -> None:
        """Close all connections; `serve` then raises an error."""
        with self._ending:
            self._over = True
            for connection in (self._conversation.connection, *self._bursting):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            while not self._joined.empty():
                close_at_once(self._joined.get_nowait().connection)

    def serve(self) -> None:
        """Answer the peer's requests.

        Raises:
            PeerError: The peer closed the connection or sent something invalid.
        """
        conversation = self._conversation
        conversation.connection.settimeout(REQUEST_TIMEOUT_S)
        conversation.send_json({"session": self.token, "services": sorted(self._services)})
        while True:
            message = conversation.receive_json()
            try:
                answer = self._answer(message)
            except PeerError:
                raise
            except RopebridgeError as error:
                answer = {"refused": str(error)}
            conversation.send_json(answer)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        kind = str(message.get("do"))
        if kind == "echo":
            return self._echo(message.get("count"))
        if kind == "burst":
            return self._burst(message)
        if kind in self._services:
            connection = self._conversation.connection
            return self._services[kind](connection.getsockname()[0], connection.getpeername()[0], message)
        return {"refused": f"{kind[:40]!r} is not a service of this responder"}

    def _echo(self, count: object) -> dict[str, Any]:
        if not isinstance(count, int) or not 0 < count <= MOST_ECHOES:
            return {"refused": f"{str(count)[:40]} echoes; at most {MOST_ECHOES} at a time"}
        for _ in range(count):
            self._conversation.send_bytes(self._conversation.receive_bytes(ECHO_BYTES))
        return {"echoed": count}

    def _burst(self, message: dict[str, Any]) -> dict[str, Any]:
        request = parse_request(message)
        try:
            connections = [self._joined.get(timeout=_JOINING_S).connection for _ in range(request.connections)]
        except queue.Empty:
            return {"refused": f"a burst over {request.connections} connections, some of which were not opened"}
        with self._ending:
            self._bursting = connections
            if self._over:
                raise PeerError("the session was replaced")
        self._conversation.send_json({"ready": True})
        try:
            if request.direction == "there":
                arrivals = receive_burst(connections, request)
                self.received_bytes += arrivals.size_bytes
                return arrivals.as_message()
            sent = send_burst(connections, request)
            self.sent_bytes += sent.size_bytes
            return {"sent": sent.size_bytes, "window_bytes": sent.window_bytes}
        finally:
            with self._ending:
                self._bursting = []
            for connection in connections:
                connection.close()
