"""What moves in one burst, and how much of that a responder lets itself in for."""

from dataclasses import dataclass
from typing import Any, Literal

from traces.common.errors import InputError

# A responder serves whoever reaches it: one burst is never more than this.
MOST_BYTES = 20_000_000_000
MOST_SECONDS = 60.0
MOST_CONNECTIONS = 32

Direction = Literal["there", "back"]


@dataclass(frozen=True, slots=True)
class BurstOrder:
    """As many bytes as fit into a time, over some connections at once.

    Attributes:
        direction: ``there`` from the peer to the responder, ``back`` the other way.
        size_bytes: At most, over all connections.
        seconds: At most, from the first byte on.
        connections: TCP connections.

    Raises:
        InputError: It is more than a responder gives, or nothing.
    """

    direction: Direction
    size_bytes: int
    seconds: float
    connections: int

    def __post_init__(self) -> None:
        if self.direction not in ("there", "back"):
            raise InputError(f"direction {self.direction!r}", valid="'there' or 'back'")
        for name, value, most in (
            ("bytes", self.size_bytes, MOST_BYTES),
            ("seconds", self.seconds, MOST_SECONDS),
            ("connections", self.connections, MOST_CONNECTIONS),
        ):
            if not 0 < value <= most:
                raise InputError(f"a burst of {value:g} {name}", valid=f"more than 0 and at most {most:g} {name}")


def order_of(message: dict[str, Any]) -> BurstOrder:
    """Return the order in a message from another host.

    Raises:
        InputError: There is none, or it asks too much.
    """
    size_bytes, seconds, connections = (message.get(key) for key in ("bytes", "seconds", "connections"))
    whole = type(size_bytes) is int and type(connections) is int
    if not whole or type(seconds) not in (int, float):
        raise InputError("a burst without a number of bytes, seconds and connections", valid="give all three")
    return BurstOrder(message.get("direction"), size_bytes, float(seconds), connections)  # type: ignore[arg-type]


def message_of(order: BurstOrder) -> dict[str, Any]:
    """Return the message that says an order."""
    return {
        "do": "burst",
        "direction": order.direction,
        "bytes": order.size_bytes,
        "seconds": order.seconds,
        "connections": order.connections,
    }
