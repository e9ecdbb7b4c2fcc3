"""Reads pre-emptions as numbers of nodes over time, in two formats without names of nodes (see `trace_of_counts`).

GPU counts, as eth-easl/sailor publishes them, are ``[{"Time": 0, "GPUs": 4}, ...]``: times are seconds, and a count
holds until the next time; the last count holds for the median step between times.

Spot counts, as skypilot-org/spot-traces publishes what providers granted, are
``{"metadata": {"gap_seconds": 300}, "data": [4, 3, ...]}``: each number of nodes holds for one gap. ``gap_seconds`` may
also stand beside ``data``.
"""

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np

from traces.common.errors import InputError
from traces.common.text import checked_count, checked_number, parse_json, parse_object
from traces.preemption.trace import PreemptionTrace, trace_of_counts
from traces.resample import duration_by_rule_s

_VALID_GPUS = 'give [{"Time": seconds, "GPUs": count}, ...]'
_VALID_SPOT = 'give {"metadata": {"gap_seconds": 300}, "data": [nodes in each gap]}'


def matches_gpus(text: str) -> bool:
    """Return whether a text looks like GPU counts: a JSON list."""
    return text.lstrip().startswith("[")


def read_gpus(text: str) -> PreemptionTrace:
    """Read GPU counts; the first time becomes time 0 of the trace.

    Raises:
        InputError: The text is not JSON, a row has other keys, a number is not a count, or times do not rise.
    """
    times_s: list[float] = []
    counts: list[int] = []
    rows = parse_json(text, _VALID_GPUS)
    if not isinstance(rows, list) or not rows:
        raise InputError("is not a JSON list with something in it", valid=_VALID_GPUS)
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != {"Time", "GPUs"}:
            raise InputError(f"{json.dumps(row)[:40]} is not a row", where=f"[{index}]", valid=_VALID_GPUS)
        times_s.append(checked_number(row["Time"], f"[{index}].Time"))
        counts.append(checked_count(row["GPUs"], f"[{index}].GPUs"))
    for index, (earlier_s, later_s) in enumerate(pairwise(times_s), start=1):
        if later_s <= earlier_s:
            problem = f"time goes from {earlier_s:.12g} s to {later_s:.12g} s"
            raise InputError(problem, where=f"[{index}].Time", valid="times must rise from row to row")
    starts_s = np.array(times_s) - times_s[0]
    return trace_of_counts(zip(starts_s.tolist(), counts, strict=True), duration_by_rule_s(starts_s))


def matches_spot(text: str) -> bool:
    """Return whether a text looks like spot counts: a JSON object with ``gap_seconds`` or ``data`` near its start."""
    return re.match(r'\s*\{[^\[]{0,1000}"gap_seconds"|\s*\{\s*"data"\s*:\s*\[', text) is not None


def read_spot(text: str) -> PreemptionTrace:
    """Read spot counts.

    Raises:
        InputError: The text is not JSON, the gap is missing or not above zero, or a number is not a count.
    """
    document = parse_object(text, _VALID_SPOT)
    gap_s = _gap_s(document)
    data = document.get("data")
    if not isinstance(data, list) or not data:
        raise InputError("there is no list of counts", where="data", valid=_VALID_SPOT)
    counts = [checked_count(value, f"data[{index}]") for index, value in enumerate(data)]
    return trace_of_counts([(index * gap_s, count) for index, count in enumerate(counts)], len(counts) * gap_s)


def _gap_s(document: dict[str, Any]) -> float:
    metadata = document.get("metadata", {})
    inner = isinstance(metadata, dict) and "gap_seconds" in metadata
    where = "metadata.gap_seconds" if inner else "gap_seconds"
    gap_s = checked_number((metadata if inner else document).get("gap_seconds"), where)
    if gap_s <= 0:
        raise InputError(f"the gap is {gap_s:g} s", where=where, valid="it must be above zero, in seconds")
    return gap_s
