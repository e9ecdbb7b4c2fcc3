"""Trace files: read one in whatever format it is, write one in the format that was asked for."""

import dataclasses
from pathlib import Path

from traces.atomic import write_text_atomically
from traces.errors import InputError
from traces.formats import FORMATS, Format
from traces.naming import find_by_name
from traces.trace import LinkTrace

_VALID = "a trace is " + "; or ".join(f"{known.name}: {known.looks_like}" for known in FORMATS.values())


def read_trace(path: Path | str, *, loops: bool = True) -> LinkTrace:
    """Read a trace; its format is recognised by what the file holds.

    Args:
        path: The file.
        loops: Whether the trace starts again after its end, which no format says.

    Raises:
        InputError: The file cannot be read, is of no known format, or is wrong; the error names the file and,
            where there is one, the line.
    """
    try:
        text = _read_text(Path(path))
        trace = _recognise(text).read(text)
    except InputError as error:
        raise error.within(str(path)) from error
    return trace if loops else dataclasses.replace(trace, loops=False)


def write_trace(trace: LinkTrace, path: Path | str, format_name: str) -> None:
    """Write a trace, whole or not at all.

    Args:
        trace: What to write.
        path: Where; a file that is there is replaced.
        format_name: A key of ``FORMATS``.

    Raises:
        InputError: There is no such format, it cannot hold this trace, or the file cannot be written.
    """
    text = find_by_name(format_name, FORMATS, "trace format").write(trace)
    write_text_atomically(path, text)


def format_of_suffix(path: Path | str) -> str:
    """Return the name of the format that a file name's suffix stands for.

    Raises:
        InputError: No format has that suffix.
    """
    suffix = Path(path).suffix.lower()
    for known in FORMATS.values():
        if suffix in known.suffixes:
            return known.name
    suffixes = ", ".join(suffix for known in FORMATS.values() for suffix in known.suffixes)
    raise InputError(
        f"the suffix '{suffix}' stands for no trace format",
        where=str(path),
        valid=f"name the format, one of {', '.join(FORMATS)}, or end the file's name in one of {suffixes}",
    )


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", valid="name a trace file") from error
    if b"\0" in data:
        raise InputError("is a binary file", valid=_VALID)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text at byte {error.start}", valid=_VALID) from error
    if not text.strip():
        raise InputError("is empty", valid=_VALID)
    return text


def _recognise(text: str) -> Format:
    for known in FORMATS.values():
        if known.matches(text):
            return known
    first = text.lstrip().partition("\n")[0].strip()
    raise InputError(f"starts with '{first[:40]}', which is no known trace format", valid=_VALID)
