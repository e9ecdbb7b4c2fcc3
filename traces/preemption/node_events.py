"""Pre-emptions as events: rows of ``ms,add,node`` and ``ms,remove,node`` (as uclasystem/bamboo publishes them).

No node is present before the first row, and the trace ends at the time of the last row.
"""

import re

from traces.common.text import LineError, check_rows, first_line, parse_scaled
from traces.preemption.trace import NodeChange, PreemptionTrace, first_mistake

MILLISECOND_POWER = -3

_FIRST_ROW = re.compile(r"[^,]*,\s*(add|remove)\s*,", re.IGNORECASE)
_VALID = "a row is milliseconds, 'add' or 'remove', and the node, such as '480000,add,node1'"


def matches(text: str) -> bool:
    """Return whether a text looks like this format: the second cell of its first line is add or remove."""
    return _FIRST_ROW.match(first_line(text)) is not None


def read(text: str) -> PreemptionTrace:
    """Read a trace.

    Raises:
        LineError: A row is malformed, times fall, a present node is added, or an absent node is removed.
    """
    check_rows(text)
    changes: list[NodeChange] = []
    lines: list[int] = []
    for line, row in enumerate(text.splitlines(), start=1):
        if row.strip():
            changes.append(_change(row, line))
            lines.append(line)
    if not changes:
        raise LineError("there is no row", line=1, valid=_VALID)
    mistake = first_mistake(changes)
    if mistake is not None:
        index, problem, valid = mistake
        raise LineError(problem, line=lines[index], valid=valid)
    return PreemptionTrace(tuple(changes), changes[-1].time_s)


def _change(row: str, line: int) -> NodeChange:
    cells = [cell.strip() for cell in row.split(",")]
    if len(cells) != 3:
        raise LineError(f"'{row.strip()[:40]}' has {len(cells)} columns", line=line, valid=_VALID)
    time, change, node = cells
    if change not in ("add", "remove"):
        raise LineError(f"'{change[:40]}' is no change", line=line, valid=_VALID)
    if not node:
        raise LineError("the node has no name", line=line, valid=_VALID)
    return NodeChange(parse_scaled(time, MILLISECOND_POWER, name="time", line=line), node, change == "add")
