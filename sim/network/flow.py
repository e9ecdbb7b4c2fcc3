"""A message on its way over links that others may use too."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Flow:
    """Bits that share links.

    Attributes:
        links: Names of the links it takes.
        bits: Still to go.
        weight: Shares that it gets: its TCP connections.
        ceiling_bps: What one of these connections carries at most.
        departed: Called with the time when the last bit has left.
    """

    links: tuple[str, ...]
    bits: float
    weight: int
    ceiling_bps: float
    departed: Callable[[float], None]
