"""Something that happens at a time, after everything else of that time."""

from collections.abc import Callable

import simpy
from simpy.events import EventPriority

# SimPy's own events have priorities 0 (urgent) and 1.
_LAST = EventPriority(2)


class Alarm(simpy.Event):
    """Calls back once at ``time_s``, with that time; a newer alarm that takes its place makes it ring in vain."""

    def __init__(self, environment: simpy.Environment, time_s: float, ring: Callable[["Alarm"], None]) -> None:
        super().__init__(environment)
        self.time_s = time_s
        self._ok = True
        self._value = None
        self.callbacks.append(ring)
        environment.schedule(self, priority=_LAST, delay=max(0.0, time_s - environment.now))
