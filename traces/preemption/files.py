"""Reads pre-emption trace files in any known format."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from traces.common.errors import InputError, find_by_name
from traces.common.text import Format, read_recognised, read_text
from traces.preemption import counts, node_events
from traces.preemption.trace import PreemptionTrace

PREEMPTION_FORMATS: Mapping[str, Format[PreemptionTrace]] = MappingProxyType(
    {
        known.name: known
        for known in (
            Format(
                name="node-events",
                looks_like="rows such as '480000,add,node1', in milliseconds",
                matches=node_events.matches,
                read=node_events.read,
            ),
            Format(
                name="spot-counts",
                looks_like='{"metadata": {"gap_seconds": 300}, "data": [4, 3]}',
                matches=counts.matches_spot,
                read=counts.read_spot,
            ),
            Format(
                name="gpu-counts",
                looks_like='[{"Time": 0, "GPUs": 4}], in seconds',
                matches=counts.matches_gpus,
                read=counts.read_gpus,
            ),
        )
    }
)
"""Format name to format."""

_VALID = "a pre-emption trace is " + "; or ".join(f"{f.name}: {f.looks_like}" for f in PREEMPTION_FORMATS.values())


def is_preemption_text(text: str) -> bool:
    """Return whether a text looks like a pre-emption trace in any format."""
    return any(known.matches(text) for known in PREEMPTION_FORMATS.values())


def is_preemption(path: Path | str) -> bool:
    """Return whether a file can be read and looks like a pre-emption trace in any format."""
    try:
        return is_preemption_text(read_text(Path(path), ""))
    except InputError:
        return False


def read_preemption(path: Path | str, format_name: str | None = None) -> PreemptionTrace:
    """Read a pre-emption trace in the format named ``format_name``; if None, in the one that the content matches.

    Raises:
        InputError: The file cannot be read, is of no known format, or is wrong; the error names the file and,
            where there is one, the line.
    """
    known = list(PREEMPTION_FORMATS.values())
    named = None if format_name is None else find_by_name(format_name, PREEMPTION_FORMATS, "pre-emption format")
    try:
        text = read_text(Path(path), _VALID)
        return named.read(text) if named else read_recognised(text, known, "pre-emption trace", _VALID)
    except InputError as error:
        raise error.within(str(path)) from error
