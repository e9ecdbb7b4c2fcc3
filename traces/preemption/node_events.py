"""Pre-emptions as events: rows of ``ms,add,node`` and ``ms,remove,node`` (as uclasystem/bamboo publishes them).

No node is present before the first row, and the trace ends at the time of the last row.
"""

import re

from traces.common.errors import InputError
from traces.common.text import LineError, first_line, parse_scaled, write_scaled
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


def write(trace: PreemptionTrace) -> str:
    """Write a trace at full precision; time after the last change is lost.

    Raises:
        InputError: The trace has no changes, or a node's name is empty or has commas or irregular white space.
    """
    if not trace.changes:
        raise InputError("the trace has no changes, and this format has no word for that", valid="write spot-counts")
    for node in trace.nodes:
        if "," in node or node != " ".join(node.split()) or not node:
            raise InputError(f"node {node!r} cannot stand in a row", valid="name nodes without commas and line breaks")
    return "".join(
        f"{_milliseconds(change.time_s)},{'add' if change.arrives else 'remove'},{change.node}\n"
        for change in trace.changes
    )


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


def _milliseconds(time_s: float) -> str:
    return write_scaled(time_s, -MILLISECOND_POWER).removesuffix(".0")
