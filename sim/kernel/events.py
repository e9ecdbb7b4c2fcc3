"""The events of the simulated network: timers, and flows of bits over links."""

from collections.abc import Callable
from dataclasses import dataclass

import simpy
from simpy.events import EventPriority

# SimPy's own events have priorities 0 (urgent) and 1.
_TIMER, _LATE_TIMER = EventPriority(2), EventPriority(3)


class Timer(simpy.Event):
    """An event that occurs at a given time, after SimPy's own events of that time.

    Args:
        time_s: When the event occurs, seconds.
        expire: Called with the timer when it occurs. A timer cannot be cancelled: the callback must ignore timers that
            a newer one has replaced.
        late: Whether the event occurs after all timers of the same time with ``late=False``, even those created
            afterwards.
    """

    def __init__(
        self, environment: simpy.Environment, time_s: float, expire: Callable[["Timer"], None], *, late: bool = False
    ) -> None:
        super().__init__(environment)
        self.time_s = time_s
        self._ok = True
        self._value = None
        self.callbacks.append(expire)
        environment.schedule(self, priority=_LATE_TIMER if late else _TIMER, delay=max(0.0, time_s - environment.now))


@dataclass(eq=False, slots=True)
class Flow:
    """Bits on their way over links that other flows may use too.

    Attributes:
        links: Names of the links on the flow's path.
        bits: Number of bits that have not departed yet.
        weight: Number of TCP connections; each gets one share of a link.
        ceiling_bps: Highest rate of each connection, bits per second.
        depart: Called with the time when the last bit has left, seconds.
    """

    links: tuple[str, ...]
    bits: float
    weight: int
    ceiling_bps: float
    depart: Callable[[float], None]
