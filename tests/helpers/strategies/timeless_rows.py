"""What happened in a run without when."""

from collections import Counter

from planner.events.event import EventKind
from planner.runs.record import RunRecord


def rows(record: RunRecord) -> Counter[tuple[object, ...]]:
    """What happened without when; who waited is a matter of when."""
    return Counter(
        (e.kind, e.device, e.peer, e.pipeline, e.stage, e.microbatch, e.step, e.action, e.size_bytes)
        for e in record.events
        if e.kind is not EventKind.RECEIVE
    )
