"""Faults that a scenario foresees: when devices leave, return and hang, and when links are out.

The simulator supplies them; what they cost is up to who recovers. Unless a policy goes on without a device that left
(`planner.scenario.recovery`) everybody waits: an action under way on a device that leaves is lost and done again after
its return (with `order: dynamic` it chooses anew), one on a device that hangs goes on. A hang or an outage of more than
a day counts as one without end.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class Absence:
    """A device is gone.

    Attributes:
        device: Its name.
        start_s: When it leaves, from the start of the run.
        end_s: When it returns; infinite if it never does.

    Raises:
        InputError: It ends before it starts.
    """

    device: str
    start_s: float
    end_s: float = math.inf

    def __post_init__(self) -> None:
        _check_times(self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class Hang:
    """A device stands still and then goes on.

    Attributes:
        device: Its name.
        start_s: From the start of the run.
        end_s: When it goes on; infinite if it never does.

    Raises:
        InputError: It ends before it starts.
    """

    device: str
    start_s: float
    end_s: float = math.inf

    def __post_init__(self) -> None:
        _check_times(self.start_s, self.end_s)


@dataclass(frozen=True, slots=True)
class LinkOutage:
    """A link carries nothing for a while.

    Attributes:
        link: Its name, ``source->target``.
        start_s: From the start of the run.
        end_s: When it carries again.

    Raises:
        InputError: It ends before it starts, or lasts for ever.
    """

    link: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        _check_times(self.start_s, self.end_s)
        if self.end_s == math.inf:
            raise InputError(f"link '{self.link}' is out for ever", valid="say when it carries again, or remove it")


Fault = Absence | Hang | LinkOutage


def find_overlap(faults: Iterable[Fault]) -> tuple[int, int] | None:
    """Return the indices of two faults that hit the same device or link at the same time; None if there are none."""
    seen: dict[str, list[tuple[int, Fault]]] = {}
    for index, fault in enumerate(faults):
        others = seen.setdefault(place_of(fault), [])
        for earlier, other in others:
            if fault.start_s < other.end_s and other.start_s < fault.end_s:
                return earlier, index
        others.append((index, fault))
    return None


def place_of(fault: Fault) -> str:
    """Return what a fault hits, as a message says it: ``device 'left'``."""
    return f"link '{fault.link}'" if isinstance(fault, LinkOutage) else f"device '{fault.device}'"


def _check_times(start_s: float, end_s: float) -> None:
    if not 0 <= start_s < math.inf or not start_s < end_s:
        raise InputError(
            f"a fault from {start_s:g} s to {end_s:g} s",
            valid="it starts at 0 s or later, from the start of the run, and ends after that",
        )
