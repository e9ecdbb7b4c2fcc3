"""Pre-emption trace files: read in any known format, written in a given one."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError, find_by_name
from traces.common.text import Format, read_text, recognised
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
                write=node_events.write,
            ),
            Format(
                name="spot-counts",
                looks_like='{"metadata": {"gap_seconds": 300}, "data": [4, 3]}',
                matches=counts.matches_spot,
                read=counts.read_spot,
                write=counts.write_spot,
            ),
            Format(
                name="gpu-counts",
                looks_like='[{"Time": 0, "GPUs": 4}], in seconds',
                matches=counts.matches_gpus,
                read=counts.read_gpus,
                write=counts.write_gpus,
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
    """Read a pre-emption trace.

    Args:
        path: Path of the file.
        format_name: A key of ``PREEMPTION_FORMATS``; None to recognise it by what the file holds.

    Raises:
        InputError: The file cannot be read, is of no known format, or is wrong; the error names the file and,
            where there is one, the line.
    """
    known = find_by_name(format_name, PREEMPTION_FORMATS, "pre-emption format") if format_name is not None else None
    try:
        text = read_text(Path(path), _VALID)
        return (known or recognised(text, PREEMPTION_FORMATS, "pre-emption trace", _VALID)).read(text)
    except InputError as error:
        raise error.within(str(path)) from error


def write_preemption(trace: PreemptionTrace, path: Path | str, format_name: str) -> None:
    """Write a pre-emption trace in one of `PREEMPTION_FORMATS`, whole or not at all; an existing file is replaced.

    Raises:
        InputError: There is no such format, it cannot hold this trace, or the file cannot be written.
    """
    write_text_atomically(path, find_by_name(format_name, PREEMPTION_FORMATS, "pre-emption format").write(trace))
