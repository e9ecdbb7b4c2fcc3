"""Chooses the jobs that a host takes: first come, first served, by the number of free devices of each kind."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# Number of devices by their kind, as in a scenario.
Devices = Mapping[str, int]


def fits(needed: Devices, offered: Devices) -> bool:
    """Return whether a host that offers some devices has all that a job needs."""
    return all(offered.get(kind, 0) >= count for kind, count in needed.items())


def choose_jobs(queue: Sequence[tuple[str, Devices]], offered: Devices, used: Iterable[Devices]) -> list[str]:
    """Return the jobs that a host takes now.

    A job that fits on the host, but not beside the jobs that the host has, makes all later jobs wait: otherwise small
    jobs could keep a large one waiting for ever. Jobs that are too large for the host are left to others.

    Args:
        queue: Each queued job, the oldest first, with the devices that it needs.
        offered: All devices of the host.
        used: The devices of each job that the host has.
    """
    free = Counter(offered)
    for devices in used:
        free.subtract(devices)
    chosen = []
    for job, needed in queue:
        if fits(needed, free):
            chosen.append(job)
            free.subtract(needed)
        elif fits(needed, offered):
            break
    return chosen
