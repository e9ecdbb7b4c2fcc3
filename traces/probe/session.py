"""What a responder does for the peer that it serves: echoes, bursts, and what else it was given."""

import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from traces.common.errors import RopebridgeError
from traces.probe.bursts import MOST_CONNECTIONS, hang_up, order_of, receive_burst, send_burst
from traces.probe.conversation import Conversation, PeerError

# Of the peer, between two wishes.
SILENCE_S = 30.0

ECHO_BYTES = 8
MOST_ECHOES = 10_000

_JOINING_S = 10.0

Service = Callable[[str, str, dict[str, Any]], dict[str, Any]]
"""Called with both addresses of the connection, the responder's first, and the message; returns the answer."""


class Session:
    """One peer's, until it hangs up or somebody else ends it.

    Args:
        conversation: With the peer, greeted.
        token: What further connections of the peer name.
        services: By name.

    Attributes:
        token: See above.
        sent_bytes: In bursts.
        received_bytes: In bursts.
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
        """Take a further connection of the peer; return whether there is room for it."""
        with self._ending:
            if self._over:
                return False
            try:
                self._joined.put_nowait(conversation)
            except queue.Full:
                return False
        with suppress(PeerError):
            conversation.say({"joined": True})
        return True

    def end(self) -> None:
        """Close all connections: whoever serves this notices."""
        with self._ending:
            self._over = True
            for connection in (self._conversation.connection, *self._bursting):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            while not self._joined.empty():
                hang_up(self._joined.get_nowait().connection)

    def serve(self) -> None:
        """Do what the peer asks, until it hangs up.

        Raises:
            PeerError: It did so, or asked for something that makes no sense.
        """
        conversation = self._conversation
        conversation.connection.settimeout(SILENCE_S)
        conversation.say({"session": self.token, "services": sorted(self._services)})
        while True:
            message = conversation.hear()
            try:
                answer = self._answer(message)
            except PeerError:
                raise
            except RopebridgeError as error:
                answer = {"refused": str(error)}
            conversation.say(answer)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        wish = str(message.get("do"))
        if wish == "echo":
            return self._echo(message.get("count"))
        if wish == "burst":
            return self._burst(message)
        if wish in self._services:
            connection = self._conversation.connection
            return self._services[wish](connection.getsockname()[0], connection.getpeername()[0], message)
        return {"refused": f"nobody here can do {wish[:40]!r}"}

    def _echo(self, count: object) -> dict[str, Any]:
        if not isinstance(count, int) or not 0 < count <= MOST_ECHOES:
            return {"refused": f"{str(count)[:40]} echoes; at most {MOST_ECHOES} at a time"}
        for _ in range(count):
            self._conversation.send(self._conversation.exactly(ECHO_BYTES))
        return {"echoed": count}

    def _burst(self, message: dict[str, Any]) -> dict[str, Any]:
        order = order_of(message)
        try:
            connections = [self._joined.get(timeout=_JOINING_S).connection for _ in range(order.connections)]
        except queue.Empty:
            return {"refused": f"a burst over {order.connections} connections, of which some are not there"}
        with self._ending:
            self._bursting = connections
            if self._over:
                raise PeerError("the session was replaced")
        self._conversation.say({"ready": True})
        try:
            if order.direction == "there":
                arrivals = receive_burst(connections, order)
                self.received_bytes += arrivals.size_bytes
                return arrivals.as_message()
            departures = send_burst(connections, order)
            self.sent_bytes += departures.size_bytes
            return {"sent": departures.size_bytes, "window_bytes": departures.window_bytes}
        finally:
            with self._ending:
                self._bursting = []
            for connection in connections:
                connection.close()
