"""What a rank's process has, whichever other ranks it is connected with."""

from collections.abc import Callable
from dataclasses import dataclass

from executor.core.clock import RunClock
from executor.rank.resources import SampleFile
from executor.recovery.backups import StateBackups
from executor.recovery.checkpoint_writer import Checkpointing
from executor.training.compute import Compute
from executor.training.tensor_parallel.layers import RankGroup
from executor.transport.shaper import LinkShaper
from planner.events.events import EventWriter


@dataclass(frozen=True, slots=True)
class RankContext:
    """One process's.

    Attributes:
        compute: Holds the layers.
        clock: Of the run.
        shaper: Emulates links; None where nothing or somebody else does.
        group: With which this rank computes; None where it does by itself.
        file: Takes all rows.
        samples: Takes what the process holds.
        safekeeping: Copies of the state; None where the run ends with the first lost rank.
        checkpointing: Writes the state to disk; None where nobody asks for that.
        note_loss: Takes a step and this rank's part of its loss.
    """

    compute: Compute
    clock: RunClock
    shaper: LinkShaper | None
    group: RankGroup | None
    file: EventWriter
    samples: SampleFile
    safekeeping: StateBackups | None
    checkpointing: Checkpointing | None
    note_loss: Callable[[int, float], None]
