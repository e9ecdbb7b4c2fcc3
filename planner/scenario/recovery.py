"""What is known of a device that leaves, and when."""

from collections.abc import Sequence

from planner.scenario.faults import Absence, Fault

# Assumed: devices say every 0.25 s that they are there, and who is not heard four times in a row counts as gone.
HEARTBEAT_S = 0.25
MISSED_HEARTBEATS = 4

# Seconds from the moment when a device leaves until the others know; who is back by then was never missed.
DETECTION_S = HEARTBEAT_S * MISSED_HEARTBEATS


def noticed_absences(faults: Sequence[Fault]) -> list[Absence]:
    """Return the absences that last long enough for the others to notice, by their start and device."""
    absences = (fault for fault in faults if isinstance(fault, Absence))
    noticed = (absence for absence in absences if absence.start_s + DETECTION_S < absence.end_s)
    return sorted(noticed, key=lambda absence: (absence.start_s, absence.device))


def known_away(absences: Sequence[Absence], time_s: float) -> tuple[str, ...]:
    """Return the devices that are known to be away at a time, by name; of absences that are noticed."""
    return tuple(
        sorted({each.device for each in absences if each.start_s + DETECTION_S <= time_s and time_s < each.end_s})
    )
