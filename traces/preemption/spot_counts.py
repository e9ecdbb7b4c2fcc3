"""Pre-emptions as a number of nodes every so many seconds: ``{"metadata": {"gap_seconds": 300}, "data": [4, 3, ...]}``.

Each number holds for one gap (the form in which skypilot-org/spot-traces publishes what providers granted; numbers
are nodes that are there). ``gap_seconds`` may also stand beside ``data``. Nodes have no names here: see
`traces.preemption.trace.trace_of_counts`.
"""

import json
import math
import re
from typing import Any

from traces.common.errors import InputError
from traces.common.json_text import checked_count, checked_number, parse_json
from traces.preemption.trace import PreemptionTrace, trace_of_counts

MAXIMUM_ROWS = 1_000_000

_VALID = 'give {"metadata": {"gap_seconds": 300}, "data": [nodes in each gap]}'


def matches(text: str) -> bool:
    """Return whether a text looks like this format: a JSON object that soon says its gap."""
    return re.match(r'\s*\{[^\[]{0,1000}"gap_seconds"|\s*\{\s*"data"\s*:\s*\[', text) is not None


def read(text: str) -> PreemptionTrace:
    """Read a trace.

    Raises:
        InputError: The text is not JSON, the gap is missing or not above zero, or a number is not a count.
    """
    document = parse_json(text, _VALID)
    gap_s = _gap_s(document)
    data = document.get("data")
    if not isinstance(data, list) or not data:
        raise InputError("there is no list of counts", where="data", valid=_VALID)
    counts = [checked_count(value, f"data[{index}]") for index, value in enumerate(data)]
    return trace_of_counts([(index * gap_s, count) for index, count in enumerate(counts)], len(counts) * gap_s)


def write(trace: PreemptionTrace) -> str:
    """Write how many nodes are there in each gap; their names are lost.

    The gap is the longest of which every change and the duration are multiples.

    Raises:
        InputError: The trace lasts no time, changes off whole milliseconds, or needs more than a million rows.
    """
    edges_ms = [round(time_s * 1e3) for time_s, _ in (*trace.counts, (trace.duration_s, 0))]
    gap_ms = math.gcd(*edges_ms)
    exact = all(edge / 1e3 == time_s for edge, (time_s, _) in zip(edges_ms, trace.counts, strict=False))
    if gap_ms == 0 or not exact or edges_ms[-1] / 1e3 != trace.duration_s or edges_ms[-1] // gap_ms > MAXIMUM_ROWS:
        raise InputError(
            "the trace has no gap of which all its times are multiples",
            valid=f"whole milliseconds and at most {MAXIMUM_ROWS:,} gaps: write node-events",
        )
    data: list[int] = []
    for start_ms, end_ms, (_, count) in zip(edges_ms, edges_ms[1:], trace.counts, strict=False):
        data += [count] * ((end_ms - start_ms) // gap_ms)
    gap = gap_ms // 1000 if gap_ms % 1000 == 0 else gap_ms / 1e3
    return json.dumps({"metadata": {"gap_seconds": gap}, "data": data}) + "\n"


def _gap_s(document: dict[str, Any]) -> float:
    metadata = document.get("metadata", {})
    inner = isinstance(metadata, dict) and "gap_seconds" in metadata
    where = "metadata.gap_seconds" if inner else "gap_seconds"
    gap_s = checked_number((metadata if inner else document).get("gap_seconds"), where)
    if gap_s <= 0:
        raise InputError(f"the gap is {gap_s:g} s", where=where, valid="it must be above zero, in seconds")
    return gap_s
