"""Pre-emptions as numbers of devices at times: ``[{"Time": 0, "GPUs": 4}, ...]`` (as eth-easl/sailor publishes them).

Times are seconds; a number holds until the next time, the last for the median step between times. Devices have no
names here: see `traces.preemption.trace.trace_of_counts`.
"""

import json
from itertools import pairwise

import numpy as np

from traces.common.errors import InputError
from traces.common.json_text import checked_count, checked_number, parse_json_list
from traces.last_step import duration_by_rule_s, starts_lasting
from traces.preemption.trace import PreemptionTrace, trace_of_counts

KEYS = ("Time", "GPUs")

_VALID = 'give [{"Time": seconds, "GPUs": count}, ...]'


def matches(text: str) -> bool:
    """Return whether a text looks like this format: a JSON list."""
    return text.lstrip().startswith("[")


def read(text: str) -> PreemptionTrace:
    """Read a trace; it starts at 0, whatever the first time is.

    Raises:
        InputError: The text is not JSON, a row has other keys, a number is not a count, or times do not rise.
    """
    rows = parse_json_list(text, _VALID)
    times_s: list[float] = []
    counts: list[int] = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != set(KEYS):
            raise InputError(f"{json.dumps(row)[:40]} is no row", where=f"[{index}]", valid=_VALID)
        times_s.append(checked_number(row["Time"], f"[{index}].Time"))
        counts.append(checked_count(row["GPUs"], f"[{index}].GPUs"))
    for index, (earlier_s, later_s) in enumerate(pairwise(times_s), start=1):
        if later_s <= earlier_s:
            problem = f"time goes from {earlier_s:.12g} s to {later_s:.12g} s"
            raise InputError(problem, where=f"[{index}].Time", valid="times must rise from row to row")
    starts_s = np.array(times_s) - times_s[0]
    return trace_of_counts(zip(starts_s.tolist(), counts, strict=True), duration_by_rule_s(starts_s))


def write(trace: PreemptionTrace) -> str:
    """Write how many nodes are there from each time on; their names are lost.

    Raises:
        InputError: The last count lasts so short beside the others that its length cannot be kept.
    """
    times_s, counts = zip(*trace.counts, strict=True)
    starts_s = starts_lasting(np.array(times_s), trace.duration_s)
    numbers = np.searchsorted(times_s, starts_s, side="right") - 1
    rows = [{"Time": time_s, "GPUs": counts[n]} for time_s, n in zip(starts_s.tolist(), numbers.tolist(), strict=True)]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
