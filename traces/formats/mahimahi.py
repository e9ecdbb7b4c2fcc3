"""Mahimahi traces: each line is the millisecond of one opportunity to send a packet of 1500 bytes.

The trace repeats after its last line. An opportunity at millisecond t carries its 12,000 bits evenly over
(t - 1, t]; an opportunity at millisecond 0 counts as one at millisecond 1.

Source: Netravali et al., "Mahimahi: Accurate Record-and-Replay for HTTP", USENIX ATC 2015.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from traces.common.errors import InputError
from traces.common.text import LineError, first_line, is_number
from traces.resample import merged
from traces.trace import LinkTrace

PACKET_BITS = 12_000
# A larger file would be refused when it is read.
MAXIMUM_LINES = 10_000_000

MillisecondArray = npt.NDArray[np.int64]

_BITS_PER_MILLISECOND_BPS = 1_000.0
_CHUNK_LINES = 1_000_000
_VALID = "a line is the whole millisecond of one 1500-byte opportunity, not before that of the line above"

# Tolerance for rounding in the cumulative bits of a trace: without it, an opportunity on a whole millisecond, as in
# every trace that was read from this format, could be written one millisecond late.
_SLACK_BITS = 1e-2
_SLACK_MS = 1e-6


def matches(text: str) -> bool:
    """Return whether a text looks like this format: one number in its first line."""
    return is_number(first_line(text))


def read(text: str) -> LinkTrace:
    """Read a trace, exact at its resolution of one millisecond.

    Raises:
        LineError: A line is not a whole number, is negative, or is earlier than the one before.
    """
    stamps_ms, counts = np.unique(np.maximum(_parse(text), 1), return_counts=True)
    # Two pieces per millisecond with opportunities: the millisecond itself, and the gap before the next opportunity.
    starts_ms = np.stack((stamps_ms - 1, stamps_ms), axis=1).ravel()
    rates_bps = np.stack((counts * PACKET_BITS * _BITS_PER_MILLISECOND_BPS, np.zeros(len(counts))), 1).ravel()
    if starts_ms[0] > 0:
        starts_ms, rates_bps = np.append(0, starts_ms), np.append(0.0, rates_bps)
    lasting = np.diff(starts_ms, append=stamps_ms[-1]) > 0
    return merged(LinkTrace(starts_ms[lasting] / 1e3, rates_bps[lasting], float(stamps_ms[-1]) / 1e3))


def write(trace: LinkTrace) -> str:
    """Write a trace; its latency is lost.

    The file has an opportunity for every 12,000 bits, at the end of the millisecond in which these bits are complete.
    Bits are counted backwards from the last opportunity, at the end of the trace; if they are no multiple of 12,000,
    the first opportunity is early. Any window of whole milliseconds keeps its bits to within one packet. The last
    opportunity is at the end of the trace, even after an outage, because it determines the duration.

    Raises:
        InputError: The trace carries nothing, or needs more than `MAXIMUM_LINES`.
    """
    num_lines = _count_lines(trace)
    return "".join("\n".join(map(str, stamps_ms.tolist())) + "\n" for stamps_ms in _opportunities_ms(trace, num_lines))


def _parse(text: str) -> MillisecondArray:
    rows = [row for row in text.splitlines() if row.strip()]
    if not rows:
        raise LineError("there is no line", line=1, valid=_VALID)
    try:
        stamps_ms = np.array(rows, dtype=np.int64)
    except (ValueError, OverflowError):
        index = next(index for index, row in enumerate(rows) if not _is_millisecond(row))
        problem = f"'{rows[index].strip()[:40]}' is not a whole number"
        raise LineError(problem, line=_line_of_row(text, index), valid=_VALID) from None
    wrong = np.flatnonzero(np.diff(stamps_ms, prepend=0) < 0)
    if len(wrong):
        index = int(wrong[0])
        before = f"time goes from {stamps_ms[index - 1]} ms to" if index else "time starts at"
        raise LineError(f"{before} {stamps_ms[index]} ms", line=_line_of_row(text, index), valid=_VALID)
    return stamps_ms


def _is_millisecond(row: str) -> bool:
    try:
        return abs(int(row)) < 2**63
    except ValueError:
        return False


def _line_of_row(text: str, index: int) -> int:
    lines = (line for line, row in enumerate(text.splitlines(), start=1) if row.strip())
    return next(itertools.islice(lines, index, None))


def _count_lines(trace: LinkTrace) -> int:
    bits = trace.mean_bps * trace.duration_s
    if bits <= 0:
        raise InputError(
            "mahimahi cannot represent a trace that carries nothing",
            valid="write csv, cooked or iperf3",
        )
    num_lines = int(np.ceil((bits - _SLACK_BITS) / PACKET_BITS))
    if num_lines > MAXIMUM_LINES:
        raise InputError(
            f"mahimahi needs a line per 1500 bytes, {num_lines:,} for this trace",
            valid=f"at most {MAXIMUM_LINES:,}: write csv, cooked or iperf3, or a shorter or slower trace",
        )
    return max(num_lines, 1)


def _opportunities_ms(trace: LinkTrace, num_lines: int) -> Iterator[MillisecondArray]:
    """Yield the milliseconds of all opportunities, in chunks of bounded size."""
    end_ms = np.int64(np.ceil(trace.duration_s * 1e3 - _SLACK_MS))
    bits = trace.mean_bps * trace.duration_s
    for first in range(0, num_lines, _CHUNK_LINES):
        after = np.arange(num_lines - 1 - first, max(-1, num_lines - 1 - first - _CHUNK_LINES), -1)
        passed_s = trace.time_to_send(np.maximum(bits - after * PACKET_BITS - _SLACK_BITS, 0.0), 0.0)
        stamps_ms = np.ceil(passed_s * 1e3 - _SLACK_MS).astype(np.int64)
        stamps_ms = np.clip(stamps_ms, 1, end_ms)
        yield np.where(after == 0, end_ms, stamps_ms)
