"""Something that happens at a time, after everything else of that time."""

from collections.abc import Callable

import simpy
from simpy.events import EventPriority

# SimPy's own events have priorities 0 (urgent) and 1.
_LAST, _AFTER_ALARMS = EventPriority(2), EventPriority(3)


class Timer(simpy.Event):
    """Calls back once at ``time_s``, with that time; a newer alarm that takes its place makes it ring in vain.

    With ``after_alarms`` it also comes after all alarms of that time, even those that are only set then.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        time_s: float,
        ring: Callable[["Timer"], None],
        *,
        after_alarms: bool = False,
    ) -> None:
        super().__init__(environment)
        self.time_s = time_s
        self._ok = True
        self._value = None
        self.callbacks.append(ring)
        priority = _AFTER_ALARMS if after_alarms else _LAST
        environment.schedule(self, priority=priority, delay=max(0.0, time_s - environment.now))
