"""The speed of a device over time as CSV: ``time_s,speed``.

A speed holds from its row to the next one, the last for ever; before the first row it is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planner.files.parsing import STRICT, Number, Part, Seconds, Seed
from planner.scenario.cluster import Cluster
from planner.scenario.effects import ComputeEffects, Slowdown, Straggler
from traces.common.errors import InputError
from traces.common.lines import LineError, check_rising, parse_scaled
from traces.common.names import find_by_name
from traces.common.text import read_text

COLUMNS = ("time_s", "speed")

_VALID = "give a header 'time_s,speed' and rows such as '10,0.5', speeds relative to the profile"


def read_speeds(path: Path) -> tuple[tuple[float, float], ...]:
    """Return the (time in seconds, speed) rows of a file.

    Raises:
        InputError: The file cannot be read or is wrong; the error names the file and, where there is one, the line.
    """
    try:
        return _rows(read_text(path, _VALID))
    except InputError as error:
        raise error.within(str(path)) from error


def from_the_start(pieces: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return (time, speed) pieces with one of speed 1 before the first, where that starts later than at 0 s."""
    return tuple(pieces) if pieces and pieces[0][0] == 0 else ((0.0, 1.0), *pieces)


def _rows(text: str) -> tuple[tuple[float, float], ...]:
    (header_line, header), *rows = (
        (line, [cell.strip() for cell in row.split(",")])
        for line, row in enumerate(text.splitlines(), start=1)
        if row.strip()
    )
    if tuple(header) != COLUMNS:
        raise LineError(f"the header is '{','.join(header)[:40]}'", line=header_line, valid=_VALID)
    pieces = []
    for line, cells in rows:
        if len(cells) != len(COLUMNS):
            raise LineError(f"the row has {len(cells)} columns", line=line, valid=_VALID)
        time, speed = (parse_scaled(cell, 0, name=name, line=line) for cell, name in zip(cells, COLUMNS, strict=True))
        pieces.append((time, speed))
    if not pieces:
        raise LineError("no row follows the header", line=header_line, valid=_VALID)
    check_rising([time for time, _ in pieces], [line for line, _ in rows])
    return tuple(pieces)


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
