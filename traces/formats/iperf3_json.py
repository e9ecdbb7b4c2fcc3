"""Output of ``iperf3 --client HOST --json``: the throughput of each interval of a test.

The reader takes the sums over all streams and skips intervals that iperf3 omits (``--omit``). The first interval starts
at time 0 of the trace, and its rate holds until the next interval starts.
"""

import json
import sys
from collections.abc import Mapping

import numpy as np

from traces.common.errors import InputError
from traces.common.text import parse_object
from traces.trace import LinkTrace

_VALID = "give the output of `iperf3 --client HOST --json`"

# A file with more would be refused when it is read.
_MOST_INTERVALS = 400_000


def matches(text: str) -> bool:
    """Return whether a text looks like this format: a JSON object."""
    return text.lstrip().startswith("{")


def read(text: str) -> LinkTrace:
    """Read a trace.

    Raises:
        InputError: The text is not JSON, not of iperf3, or of a test that failed; a rate is missing or
            negative.
    """
    document = parse_object(text, _VALID)
    if "error" in document:
        raise InputError(f"iperf3 failed: {document['error']}", valid="record the trace again")
    sums = _kept_sums(document.get("intervals"))
    starts_s = np.array([_number(found, "start", where) for where, found in sums])
    rates_bps = np.array([_number(found, "bits_per_second", where) for where, found in sums])
    last_where, last = sums[-1]
    end_s = _number(last, "end", last_where)
    edges_s = np.append(starts_s, end_s)
    for index in np.flatnonzero(np.diff(edges_s) <= 0).tolist():
        problem = f"time goes from {edges_s[index]:.12g} s to {edges_s[index + 1]:.12g} s"
        where = sums[min(index + 1, len(sums) - 1)][0]
        raise InputError(problem, where=where, valid="times must rise from interval to interval")
    return LinkTrace(starts_s - starts_s[0], rates_bps, end_s - starts_s[0])


def write(trace: LinkTrace) -> str:
    """Write a JSON document with the intervals' rates at full precision; the latency is lost."""
    if len(trace.times_s) > _MOST_INTERVALS:
        raise InputError(
            f"iperf3 needs an interval per piece, {len(trace.times_s):,} for this trace",
            valid=f"at most {_MOST_INTERVALS:,}: write csv or cooked, or a trace of fewer pieces",
        )
    edges_s = [*trace.times_s.tolist(), trace.duration_s]
    pieces = zip(edges_s, edges_s[1:], trace.bandwidth_bps.tolist(), strict=False)
    intervals = (
        json.dumps(
            {
                "sum": {
                    "start": start_s,
                    "end": end_s,
                    "seconds": end_s - start_s,
                    "bytes": round((end_s - start_s) * rate_bps / 8),
                    "bits_per_second": rate_bps,
                    "omitted": False,
                }
            }
        )
        for start_s, end_s, rate_bps in pieces
    )
    return '{"intervals": [\n ' + ",\n ".join(intervals) + "\n]}\n"


def _kept_sums(intervals: object) -> list[tuple[str, Mapping[str, object]]]:
    """Return the sum of every interval that was not omitted, each with its place in the document."""
    if not isinstance(intervals, list):
        raise InputError("there is no list of intervals", where="intervals", valid=_VALID)
    sums: list[tuple[str, Mapping[str, object]]] = []
    for index, interval in enumerate(intervals):
        where = f"intervals[{index}].sum"
        found = interval.get("sum") if isinstance(interval, dict) else None
        if not isinstance(found, dict):
            raise InputError("the interval has no sum", where=where, valid=_VALID)
        if not found.get("omitted", False):
            sums.append((where, found))
    if not sums:
        raise InputError("no interval was measured", where="intervals", valid="record the trace again")
    return sums


def _number(found: Mapping[str, object], key: str, where: str) -> float:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{key} is {json.dumps(value)[:40]}", where=where, valid="a number is needed")
    if not 0 <= value <= sys.float_info.max:
        raise InputError(f"{key} is {str(value)[:40]}", where=where, valid="it must be finite and not negative")
    return float(value)
