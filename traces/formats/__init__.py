"""The file formats of link traces: the format of a file is recognised on reading, and chosen by name on writing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError, find_by_name
from traces.common.text import Format, read_recognised, read_text
from traces.formats import cooked, csv_units, iperf3_json, mahimahi
from traces.preemption.files import is_preemption_text
from traces.trace import LinkTrace


@dataclass(frozen=True, kw_only=True)
class TraceFormat(Format[LinkTrace]):
    """A file format of link traces, which can be read and written.

    Attributes:
        write: Formats a trace as text; raises InputError if the format cannot represent the trace.
        suffixes: File name suffixes of the format.
        keeps_latency: Whether the format can hold the latency of a link.
    """

    write: Callable[[LinkTrace], str]
    suffixes: tuple[str, ...]
    keeps_latency: bool = False


FORMATS: Mapping[str, TraceFormat] = MappingProxyType(
    {
        file_format.name: file_format
        for file_format in (
            TraceFormat(
                name="csv",
                looks_like="a header with units such as 'time_s,bandwidth_mbps,latency_ms'",
                suffixes=(".csv",),
                matches=csv_units.matches,
                read=csv_units.read,
                write=csv_units.write,
                keeps_latency=True,
            ),
            TraceFormat(
                name="mahimahi",
                looks_like="one whole millisecond per line",
                suffixes=(".mahi", ".mahimahi"),
                matches=mahimahi.matches,
                read=mahimahi.read,
                write=mahimahi.write,
            ),
            TraceFormat(
                name="cooked",
                looks_like="two columns without a header, seconds and Mbit/s",
                suffixes=(".cooked",),
                matches=cooked.matches,
                read=cooked.read,
                write=cooked.write,
            ),
            TraceFormat(
                name="iperf3",
                looks_like="the output of `iperf3 --client HOST --json`",
                suffixes=(".json",),
                matches=iperf3_json.matches,
                read=iperf3_json.read,
                write=iperf3_json.write,
            ),
        )
    }
)
"""Format name to format."""

_VALID = "a trace is " + "; or ".join(f"{known.name}: {known.looks_like}" for known in FORMATS.values())


def read_trace(path: Path | str, *, loops: bool = True) -> LinkTrace:
    """Read a trace in the format that the file's content matches.

    ``loops`` says whether the trace starts again after its end, which no format stores.

    Raises:
        InputError: The file cannot be read, is of no known format, or is wrong; the error names the file and,
            where there is one, the line.
    """
    try:
        text = read_text(Path(path), _VALID)
        if is_preemption_text(text):
            raise InputError("is a trace of pre-emptions, not of a link", valid=_VALID)
        trace = read_recognised(text, FORMATS.values(), "trace format", _VALID)
    except InputError as error:
        raise error.within(str(path)) from error
    return trace if loops else replace(trace, loops=False)


def write_trace(trace: LinkTrace, path: Path | str, format_name: str) -> None:
    """Write a trace in one of `FORMATS`, whole or not at all; an existing file is replaced.

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
