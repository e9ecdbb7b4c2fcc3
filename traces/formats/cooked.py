"""Cooked traces: rows of ``seconds Mbit/s``, a format of research on video streaming.

A rate holds until the next row; the last rate holds for the median step between rows, or one second if there is one
row. The first row may have any time, which becomes time 0 of the trace. Consecutive rows of equal rate become one
piece.

The writer repeats the last rate in further rows where that rule would not give the duration of the trace.
"""

import numpy as np

from traces.common.text import LineError, check_rising, check_rows, first_line, is_number, parse_scaled, write_scaled
from traces.resample import duration_by_rule_s, merged, starts_lasting
from traces.trace import LinkTrace

MEGABIT_POWER = 6


def matches(text: str) -> bool:
    """Return whether a text looks like this format: two numbers in its first line."""
    fields = first_line(text).split()
    return len(fields) == 2 and all(map(is_number, fields))


def read(text: str) -> LinkTrace:
    """Read a trace.

    Raises:
        LineError: A row is not two numbers, a rate is negative, or time does not rise.
    """
    check_rows(text)
    times_s, rates_bps, lines = [], [], []
    for line, row in enumerate(text.splitlines(), start=1):
        fields = row.split()
        if not fields:
            continue
        if len(fields) != 2:
            raise LineError(
                f"'{row.strip()[:40]}' has {len(fields)} columns",
                line=line,
                valid="a row is two numbers, seconds and Mbit/s, such as '5.0 1.25'",
            )
        times_s.append(parse_scaled(fields[0], 0, name="time", line=line))
        rates_bps.append(parse_scaled(fields[1], MEGABIT_POWER, name="rate", line=line))
        lines.append(line)
    if not lines:
        raise LineError("there is no row", line=1, valid="give rows of seconds and Mbit/s")
    check_rising(times_s, lines)
    starts_s = np.array(times_s) - times_s[0]
    return merged(LinkTrace(starts_s, np.array(rates_bps), duration_by_rule_s(starts_s)))


def write(trace: LinkTrace) -> str:
    """Write a trace at full precision; its latency is lost.

    Raises:
        InputError: The last piece is so short, compared with the others, that the file cannot represent its length.
    """
    times_s = starts_lasting(trace.times_s, trace.duration_s)
    rates_bps = trace.bandwidth_at(times_s)
    rows = zip(times_s.tolist(), rates_bps.tolist(), strict=True)
    return "".join(f"{time_s!r}\t{write_scaled(rate_bps, -MEGABIT_POWER)}\n" for time_s, rate_bps in rows)
