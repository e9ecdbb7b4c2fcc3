"""CSV whose header names the unit of every column: ``time_s,bandwidth_mbps,latency_ms``.

A rate holds until the next row; the last rate holds for the median step between rows, or one second if there is one
row. If the last row has only a time, that time is the end of the trace instead. The first row may have any time, which
becomes time 0 of the trace. Rows that begin with ``#`` are comments. In a recording (`RECORDING_HEADER`), which grows
row by row, a last row without line end is ignored.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from traces.common.text import LineError, check_rising, check_rows, first_line, parse_scaled
from traces.resample import duration_by_rule_s
from traces.trace import LinkTrace

COLUMNS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "time_s": ("time", 0),
        "time_ms": ("time", -3),
        "time_us": ("time", -6),
        "bandwidth_bps": ("bandwidth", 0),
        "bandwidth_kbps": ("bandwidth", 3),
        "bandwidth_mbps": ("bandwidth", 6),
        "bandwidth_gbps": ("bandwidth", 9),
        "latency_s": ("latency", 0),
        "latency_ms": ("latency", -3),
        "latency_us": ("latency", -6),
    }
)
"""Column name to (quantity, exponent of ten that converts the column's unit to the SI unit)."""

QUANTITIES = ("time", "bandwidth", "latency")

RECORDING_HEADER = 'time_s,bandwidth_mbps,"latency_ms"\n'
"""Header of a file that `traces.probe.recording` appends to; the quotes tell it from other CSV files."""


# Comments above the header.
_COMMENTS = re.compile(r"(?:#.*\n|\s)*")

# Rows that are written at a time.
_PART_ROWS = 100_000


def matches(text: str) -> bool:
    """Return whether a text looks like this format: a column of its header names a quantity."""
    header = first_line(_COMMENTS.sub("", text, count=1))
    return any(cell.lower().startswith(QUANTITIES) for cell in _cells(header))


def read(text: str) -> LinkTrace:
    """Read a trace.

    Raises:
        LineError: A column has no unit or an unknown one, a cell is not a number or negative, or time does
            not rise.
    """
    if text.startswith(RECORDING_HEADER):
        # Text after the last line end is an incomplete row.
        text = text[: text.rindex("\n") + 1]
    check_rows(text)
    # Cells are split row by row, since all of them together take several times the memory of the text.
    rows = [(line, row) for line, row in enumerate(text.splitlines(), start=1) if row.strip()[:1] not in ("", "#")]
    header_line, first = rows[0] if rows else (1, "")
    header = _cells(first)
    columns, rows = _parse_header(header, header_line), rows[1:]
    values: dict[str, list[float]] = {quantity: [] for quantity, _ in columns}
    for line, row in rows:
        cells = _cells(row)
        if line == rows[-1][0] and 1 < len(cells) < len(header) and columns[0][0] == "time" and not any(cells[1:]):
            # One comma is enough after the time of the end; without it the row may have been cut off.
            cells += [""] * (len(header) - len(cells))
        if len(cells) != len(header):
            valid = f"the header names {len(header)}"
            raise LineError(f"the row has {len(cells)} columns", line=line, valid=valid)
        is_end = line == rows[-1][0] and not any(
            cell for (quantity, _), cell in zip(columns, cells, strict=True) if quantity != "time"
        )
        for (quantity, power), cell in zip(columns, cells, strict=True):
            if quantity == "time" or not is_end:
                values[quantity].append(parse_scaled(cell, power, name=quantity, line=line))
    if not values["bandwidth"]:
        raise LineError("no row follows the header", line=header_line, valid="give a time and a rate per row")
    check_rising(values["time"], [line for line, _ in rows])
    return _trace(values)


def write(trace: LinkTrace) -> str:
    """Write a trace in SI units at full precision, with a row for its end if the reader could not infer the end."""
    columns = {"time_s": trace.times_s, "bandwidth_bps": trace.bandwidth_bps}
    if trace.latency_s is not None:
        columns["latency_s"] = trace.latency_s
    # In parts, since numbers as Python's objects take several times the memory of the text.
    parts = [",".join(columns) + "\n"]
    for first in range(0, len(trace.times_s), _PART_ROWS):
        values = [column[first : first + _PART_ROWS].tolist() for column in columns.values()]
        parts.append("".join(",".join(map(repr, row)) + "\n" for row in zip(*values, strict=True)))
    if duration_by_rule_s(trace.times_s) != trace.duration_s:
        parts.append(repr(trace.duration_s) + "," * (len(columns) - 1) + "\n")
    return "".join(parts)


def _cells(row: str) -> list[str]:
    return [cell.strip().strip('"') for cell in row.split(",")]


def _trace(values: dict[str, list[float]]) -> LinkTrace:
    starts_s = np.array(values["time"]) - values["time"][0]
    rates_bps = np.array(values["bandwidth"])
    latency_s = np.array(values["latency"]) if "latency" in values else None
    if len(starts_s) > len(rates_bps):
        return LinkTrace(starts_s[:-1], rates_bps, float(starts_s[-1]), latency_s)
    return LinkTrace(starts_s, rates_bps, duration_by_rule_s(starts_s), latency_s)


def _parse_header(header: list[str], line: int) -> list[tuple[str, int]]:
    valid = f"valid columns are {', '.join(COLUMNS)}"
    for name in header:
        if name not in COLUMNS:
            problem = "has no unit" if name in QUANTITIES else "is unknown or has an unknown unit"
            raise LineError(f"column '{name}' {problem}", line=line, valid=valid)
    columns = [COLUMNS[name] for name in header]
    for quantity in QUANTITIES:
        count = sum(quantity == found for found, _ in columns)
        if count > 1:
            raise LineError(f"there are {count} columns of {quantity}", line=line, valid="keep one of them")
        if count == 0 and quantity != "latency":
            raise LineError(f"there is no column of {quantity}", line=line, valid=valid)
    return columns
