"""The ``compute`` effects of a scenario."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from planner.files.parsing import STRICT
from planner.files.parts import Part
from planner.files.quantities import Number, Seconds, Seed
from planner.files.speed_file import from_the_start, read_speeds
from planner.scenario.cluster import Cluster
from planner.scenario.effects import ComputeEffects, Slowdown, Straggler
from traces.common.errors import InputError
from traces.common.names import find_by_name


@dataclass(frozen=True, kw_only=True)
class StragglerEntry:
    """A device whose compute takes ``factor`` times as long as profiled."""

    device: str
    factor: Number

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class SpeedPiece:
    """The speed of a device from a time on, relative to the profile: ``{from: 10 s, speed: 0.5}``."""

    start: Annotated[Seconds, Field(alias="from")]
    speed: Number

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class SlowdownEntry:
    """A device whose speed changes, as ``pieces`` or as the path of a CSV ``file`` with columns time_s and speed."""

    device: str
    file: str | None = None
    pieces: tuple[SpeedPiece, ...] | None = None

    __pydantic_config__ = STRICT


@dataclass(frozen=True, kw_only=True)
class ComputeEntry:
    """What happens to profiled times.

    Attributes:
        launch_overhead: Added to every forward and every backward.
        jitter: Standard deviation of an action's time, as a share of its mean.
        seed: Of the jitter.
        stragglers: Devices that always take longer.
        slowdowns: Devices whose speed changes.
        transfers_block: Whether a device computes nothing while it sends or receives between stages.
    """

    launch_overhead: Seconds = 0.0
    jitter: Number = 0.0
    seed: Seed = 0
    stragglers: tuple[StragglerEntry, ...] = ()
    slowdowns: tuple[SlowdownEntry, ...] = ()
    transfers_block: bool = False

    __pydantic_config__ = STRICT


def compute_effects(entry: ComputeEntry, cluster: Cluster, part: Part) -> ComputeEffects:
    """Return the effects that an entry denotes, which stands in the ``effects``.

    Raises:
        InputError: A value is out of range, a device is not there, or a file is wrong.
    """
    stragglers = _stragglers(entry.stragglers, cluster, part)
    slowdowns = _slowdowns(entry.slowdowns, cluster, part)
    try:
        return ComputeEffects(
            launch_overhead_s=entry.launch_overhead,
            jitter=entry.jitter,
            seed=entry.seed,
            stragglers=stragglers,
            slowdowns=slowdowns,
            transfers_block=entry.transfers_block,
        )
    except InputError as error:
        raise error.within(part.where("compute")) from None


def _stragglers(entries: Sequence[StragglerEntry], cluster: Cluster, part: Part) -> tuple[Straggler, ...]:
    made = []
    for index, entry in enumerate(entries):
        place = ("compute", "stragglers", index)
        find_by_name(entry.device, cluster.by_name, "device", where=part.where(*place, "device"))
        try:
            made.append(Straggler(entry.device, entry.factor))
        except InputError as error:
            raise error.within(part.where(*place, "factor")) from None
    return tuple(made)


def _slowdowns(entries: Sequence[SlowdownEntry], cluster: Cluster, part: Part) -> tuple[Slowdown, ...]:
    made = []
    for index, entry in enumerate(entries):
        place = ("compute", "slowdowns", index)
        find_by_name(entry.device, cluster.by_name, "device", where=part.where(*place, "device"))
        if (entry.file is None) == (entry.pieces is None):
            where = part.where(*place)
            raise InputError("the slow-down needs its speeds", where=where, valid="give one of 'file' and 'pieces'")
        try:
            if entry.file is not None:
                pieces = read_speeds(part.path(entry.file))
            else:
                pieces = tuple((piece.start, piece.speed) for piece in entry.pieces or ())
                if not pieces:
                    raise InputError("there are no pieces", valid="give at least one, as {from: 10 s, speed: 0.5}")
            times_s, speeds = zip(*from_the_start(pieces), strict=True)
            made.append(Slowdown(entry.device, times_s, speeds))
        except InputError as error:
            raise error.within(part.where(*place)) from None
    return tuple(made)
