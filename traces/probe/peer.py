"""The near end of a measurement: asks a responder for echoes and bursts."""

import socket
import time
from types import TracebackType
from typing import Any, Self

from traces.common.errors import InputError, RunError
from traces.probe.arrivals import Arrivals, arrivals_of
from traces.probe.bursts import BurstOrder, hang_up, message_of, receive_burst, send_burst
from traces.probe.conversation import Address, Conversation, PeerError, StrangerError
from traces.probe.session import ECHO_BYTES

# What an answer may take beside the burst that it is about, seconds.
PATIENCE_S = 10.0

# For a responder to start, and from one look at it to the next, seconds.
STARTING_S = 6.0
_PAUSE_S = 0.2

_REMEDY = "start 'ropebridge profile network --listen ADDRESS' on that host"


class BusyError(RunError):
    """The responder serves somebody else."""


class Peer:
    """A session with a responder, from ``with`` to its end.

    Args:
        address: Of the responder.
        patience_s: How long anything may take beside a burst, seconds.
        replaces: Token of a session of ours that broke: the responder may not know yet.

    Attributes:
        token: Of the session.
        services: What the responder does beside echoes and bursts.

    Raises:
        InputError: Nobody is there, or somebody else.
        BusyError: The responder serves somebody else.
        PeerError: It hung up.
    """

    def __init__(self, address: Address, patience_s: float = PATIENCE_S, replaces: str = "") -> None:
        self.address = address
        self._patience_s = patience_s
        self._conversation = self._connect()
        try:
            self._conversation.say({"want": "session", "replaces": replaces})
            answer = self._conversation.hear()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session."""
        self._conversation.connection.close()

    @property
    def own_host(self) -> str:
        """The address of this end, as the responder reaches it."""
        return str(self._conversation.connection.getsockname()[0])

    @property
    def host(self) -> str:
        """The responder's address, as a number."""
        return str(self._conversation.connection.getpeername()[0])

    def round_trips_s(self, count: int) -> list[float]:
        """Return the times of so many round trips of single packets, one after the other, seconds."""
        self._conversation.say({"do": "echo", "count": count})
        found = []
        for number in range(count):
            packet = number.to_bytes(ECHO_BYTES, "big")
            start_s = time.perf_counter()
            self._conversation.send(packet)
            if self._conversation.exactly(ECHO_BYTES) != packet:
                raise PeerError(f"{self.address} answered with another echo")
            found.append(time.perf_counter() - start_s)
        self._conversation.hear()
        return found

    def burst(self, order: BurstOrder) -> tuple[Arrivals, float | None]:
        """Let a burst pass, over connections of its own.

        Returns:
            When it arrived; and the buffer or window, in bytes, that held its sender up, None if that was the path.
        """
        connections: list[socket.socket] = []
        try:
            for _ in range(order.connections):
                connections.append(self._join())
            self._conversation.say(message_of(order))
            self._conversation.hear()
            self._conversation.connection.settimeout(order.seconds + self._patience_s)
            if order.direction == "back":
                arrivals = receive_burst(connections, order)
                window = self._conversation.hear().get("window_bytes")
            else:
                window = send_burst(connections, order).window_bytes
                arrivals = arrivals_of(self._conversation.hear())
            self._conversation.connection.settimeout(self._patience_s)
        finally:
            for connection in connections:
                hang_up(connection)
        return arrivals, float(window) if isinstance(window, int | float) else None

    def ask(self, service: str, message: dict[str, Any]) -> None:
        """Ask for another service, without waiting for its answer."""
        self._conversation.say({**message, "do": service})

    def answer(self, silence_s: float) -> dict[str, Any]:
        """Return the answer to what was asked, for which the responder may take so long."""
        self._conversation.connection.settimeout(silence_s)
        answer = self._conversation.hear()
        self._conversation.connection.settimeout(self._patience_s)
        return answer

    def _join(self) -> socket.socket:
        conversation = self._connect()
        try:
            conversation.say({"join": self.token})
            conversation.hear()
        except BaseException:
            conversation.connection.close()
            raise
        return conversation.connection

    def _connect(self) -> Conversation:
        connection = _open(self.address, self._patience_s)
        try:
            conversation = Conversation(connection, self._patience_s, str(self.address))
            conversation.greet()
        except StrangerError as error:
            connection.close()
            raise InputError(f"what listens at {self.address} is no responder: it {error}", valid=_REMEDY) from error
        except BaseException:
            connection.close()
            raise
        return conversation


def await_listener(address: Address, patience_s: float = STARTING_S) -> None:
    """Wait until somebody listens: a responder that was started a moment ago takes its time, on a small host above all.

    Nothing is said where nobody comes: who connects then says what is wrong.
    """
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        try:
            socket.create_connection((address.host, address.port), timeout=patience_s).close()
        except ConnectionRefusedError:
            time.sleep(_PAUSE_S)
        except OSError:
            return
        else:
            return


def _open(address: Address, patience_s: float) -> socket.socket:
    try:
        return socket.create_connection((address.host, address.port), timeout=patience_s)
    except socket.gaierror as error:
        raise InputError(f"there is no host '{address.host}': {error.strerror}", valid="check the name") from error
    except ConnectionRefusedError as error:
        raise InputError(f"nobody listens at {address}", valid=_REMEDY) from error
    except TimeoutError as error:
        raise InputError(
            f"{address} does not answer within {patience_s:g} s", valid="check the address, and firewalls on the way"
        ) from error
    except OSError as error:
        raise InputError(f"{address} cannot be reached: {error.strerror}", valid="check the address") from error
