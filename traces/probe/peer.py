"""The active end of a measurement, which opens a session with a responder and requests echoes and bursts."""

import socket
import time
from typing import Any, Self

from traces.common.errors import InputError, RunError
from traces.probe.arrivals import Arrivals, arrivals_of
from traces.probe.bursts import BurstRequest, close_at_once, receive_burst, send_burst
from traces.probe.conversation import Address, Conversation, PeerError, UnknownPeerError
from traces.probe.session import ECHO_BYTES

# Limit on the wait for an answer, seconds, in addition to the duration of a burst.
ANSWER_TIMEOUT_S = 10.0

# Limit on the time that a responder takes to start, and pause between two attempts to reach it, seconds.
STARTUP_TIMEOUT_S = 6.0
_PAUSE_S = 0.2

_REMEDY = "start 'ropebridge profile network --listen ADDRESS' on that host"


class BusyError(RunError):
    """The responder serves another peer."""


class Peer:
    """A session with a responder; a context manager that closes it.

    Args:
        timeout_s: Longest wait for an answer, in addition to the duration of a burst, seconds.
        replaces: Token of an earlier session that this one replaces: the responder may still hold its broken
            connection.

    Attributes:
        services: Names of the responder's services besides echoes and bursts.

    Raises:
        InputError: Nothing listens at the address, or it is not a responder.
        BusyError: The responder serves another peer.
        PeerError: The responder closed the connection.
    """

    def __init__(self, address: Address, timeout_s: float = ANSWER_TIMEOUT_S, replaces: str = "") -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._conversation = self._connect()
        try:
            self._conversation.send_json({"want": "session", "replaces": replaces})
            answer = self._conversation.receive_json()
            if answer.get("busy"):
                raise BusyError(f"{address} serves another peer: try again when that is done")
            self.token = str(answer.get("session"))
            offered = answer.get("services")
            self.services = frozenset(map(str, offered)) if isinstance(offered, list) else frozenset()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session."""
        self._conversation.connection.close()

    @property
    def own_host(self) -> str:
        """Address of this host, as the responder reaches it."""
        return str(self._conversation.connection.getsockname()[0])

    @property
    def host(self) -> str:
        """IP address of the responder."""
        return str(self._conversation.connection.getpeername()[0])

    def round_trips_s(self, count: int) -> list[float]:
        """Return the durations of round trips of single packets, made one after the other, seconds."""
        self._conversation.send_json({"do": "echo", "count": count})
        found = []
        for number in range(count):
            packet = number.to_bytes(ECHO_BYTES, "big")
            start_s = time.perf_counter()
            self._conversation.send_bytes(packet)
            if self._conversation.receive_bytes(ECHO_BYTES) != packet:
                raise PeerError(f"{self.address} echoed other bytes than were sent")
            found.append(time.perf_counter() - start_s)
        self._conversation.receive_json()
        return found

    def burst(self, request: BurstRequest) -> tuple[Arrivals, float | None]:
        """Carry out a burst over connections that are opened for it.

        Returns:
            The arrivals at the receiver; and the buffer or window that limited the sender, bytes, None if the path did.

        Raises:
            InputError: No connection can be opened, but the responder is there.
            PeerError: The responder has ended, closed a connection or was silent.
        """
        connections: list[socket.socket] = []
        try:
            for _ in range(request.connections):
                connections.append(self._join())
            self._conversation.send_json(request.as_message())
            self._conversation.receive_json()
            self._conversation.connection.settimeout(request.seconds + self._timeout_s)
            if request.direction == "back":
                arrivals = receive_burst(connections, request)
                window = self._conversation.receive_json().get("window_bytes")
            else:
                window = send_burst(connections, request).window_bytes
                arrivals = arrivals_of(self._conversation.receive_json())
            self._conversation.connection.settimeout(self._timeout_s)
        finally:
            for connection in connections:
                close_at_once(connection)
        return arrivals, float(window) if isinstance(window, int | float) else None

    def ask(self, service: str, message: dict[str, Any]) -> None:
        """Ask for a service of the responder, without waiting for its answer."""
        self._conversation.send_json({**message, "do": service})

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Return the answer to the request that `ask` sent; wait for at most ``timeout_s`` seconds."""
        self._conversation.connection.settimeout(timeout_s)
        answer = self._conversation.receive_json()
        self._conversation.connection.settimeout(self._timeout_s)
        return answer

    def _join(self) -> socket.socket:
        try:
            conversation = self._connect()
        except InputError as error:
            if not isinstance(error.__cause__, ConnectionRefusedError):
                raise
            # It listened when the session began.
            raise PeerError(f"{self.address} closed the connection: {error.problem}") from error
        try:
            conversation.send_json({"join": self.token})
            conversation.receive_json()
        except BaseException:
            conversation.connection.close()
            raise
        return conversation.connection

    def _connect(self) -> Conversation:
        connection = _open(self.address, self._timeout_s)
        try:
            conversation = Conversation(connection, self._timeout_s, str(self.address))
            conversation.greet()
        except UnknownPeerError as error:
            connection.close()
            raise InputError(f"what listens at {self.address} is not a responder: it {error}", valid=_REMEDY) from error
        except BaseException:
            connection.close()
            raise
        return conversation


def await_listener(address: Address, timeout_s: float = STARTUP_TIMEOUT_S) -> None:
    """Wait until something listens at an address: a responder takes some time to start.

    Returns after ``timeout_s`` in any case; a later connection attempt raises an error that names the cause.
    """
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        try:
            socket.create_connection((address.host, address.port), timeout=timeout_s).close()
        except ConnectionRefusedError:
            time.sleep(_PAUSE_S)
        except OSError:
            return
        else:
            return


def _open(address: Address, timeout_s: float) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), timeout=timeout_s)
    except socket.gaierror as error:
        raise InputError(f"there is no host '{address.host}': {error.strerror}", valid="check the name") from error
    except ConnectionRefusedError as error:
        raise InputError(f"nothing listens at {address}", valid=_REMEDY) from error
    except TimeoutError as error:
        raise InputError(
            f"{address} does not answer within {timeout_s:g} s", valid="check the address, and firewalls on the way"
        ) from error
    except OSError as error:
        raise InputError(f"{address} cannot be reached: {error.strerror}", valid="check the address") from error
