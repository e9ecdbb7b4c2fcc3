"""The speed of a device over time as CSV: ``time_s,speed``.

A speed holds from its row to the next one, the last for ever; before the first row it is 1.
"""

from collections.abc import Sequence
from pathlib import Path

from traces.common.errors import InputError
from traces.common.lines import LineError, check_rising, parse_scaled
from traces.common.text_files import read_text

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
