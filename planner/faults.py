"""Faults that a scenario foresees: when devices leave, return and hang, and when links are out.

The simulator supplies them; what they cost is up to who recovers. Without a recovery policy everybody waits: an action
under way on a device that leaves is lost and done again after its return, one on a device that hangs goes on.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Absence:
    """A device is gone.

    Attributes:
        device: Its name.
        start_s: When it leaves, from the start of the run.
        end_s: When it returns; infinite if it never does.
    """

    device: str
    start_s: float
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Hang:
    """A device stands still and then goes on.

    Attributes:
        device: Its name.
        start_s: From the start of the run.
        end_s: When it goes on; infinite if it never does.
    """

    device: str
    start_s: float
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class LinkOutage:
    """A link carries nothing for a while.

    Attributes:
        link: Its name, ``source->target``.
        start_s: From the start of the run.
        end_s: When it carries again.
    """

    link: str
    start_s: float
    end_s: float


Fault = Absence | Hang | LinkOutage
