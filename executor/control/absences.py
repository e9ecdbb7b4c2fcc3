"""Since when devices of a run have been gone, as it shows in its rows."""

from collections.abc import Collection, Iterable, Sequence

from planner.events.event import (
    ABSENT,
    Event,
    EventKind,
    fault_event,
)


class Absences:
    """Those of the ranks whose processes were lost, foreseen by the scenario or not."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}
        self._over: list[Event] = []

    def begin(self, devices: Iterable[str], now_s: float) -> None:
        """Take note that devices were found to be gone at a second of the run; who is gone already stays so."""
        for device in devices:
            self._since_s.setdefault(device, now_s)

    def see(self, events: Sequence[Event], away: Collection[str]) -> None:
        """Take the rows of a finished step, and who is away: who computes, or is not away, is there again."""
        if not self._since_s:
            return
        computed = (event for event in events if event.kind is EventKind.COMPUTE and event.device in self._since_s)
        for event in sorted(computed, key=lambda event: event.start_s):
            since_s = self._since_s.pop(event.device, None)
            if since_s is not None:
                self._over.append(fault_event(event.device, ABSENT, since_s, event.start_s))
        end_s = max((event.end_s for event in events), default=0.0)
        for device in [device for device in self._since_s if device not in away]:
            since_s = self._since_s.pop(device)
            self._over.append(fault_event(device, ABSENT, since_s, max(since_s, end_s)))

    def events(self, end_s: float) -> list[Event]:
        """Return a row for each absence; one that still lasts is cut at the run's end, a second of it."""
        lasting = (fault_event(device, ABSENT, since_s, end_s) for device, since_s in self._since_s.items())
        return [*self._over, *lasting]
