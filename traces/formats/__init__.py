"""The file formats of traces, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from traces.formats import cooked, csv_units, iperf3_json, mahimahi
from traces.trace import LinkTrace


@dataclass(frozen=True, kw_only=True)
class Format:
    """One file format of traces.

    Attributes:
        looks_like: Description of such a file, for messages.
        matches: Returns whether a text looks like this format; no text matches two formats.
        read: Returns the trace in a text, which loops; raises InputError.
        write: Returns the text of a trace; raises InputError if the format cannot hold it.
    """

    name: str
    looks_like: str
    suffixes: tuple[str, ...]
    matches: Callable[[str], bool]
    read: Callable[[str], LinkTrace]
    write: Callable[[LinkTrace], str]
    keeps_latency: bool = False


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        file_format.name: file_format
        for file_format in (
            Format(
                name="csv",
                looks_like="a header with units such as 'time_s,bandwidth_mbps,latency_ms'",
                suffixes=(".csv",),
                matches=csv_units.matches,
                read=csv_units.read,
                write=csv_units.write,
                keeps_latency=True,
            ),
            Format(
                name="mahimahi",
                looks_like="one whole millisecond per line",
                suffixes=(".mahi", ".mahimahi"),
                matches=mahimahi.matches,
                read=mahimahi.read,
                write=mahimahi.write,
            ),
            Format(
                name="cooked",
                looks_like="two columns without a header, seconds and Mbit/s",
                suffixes=(".cooked",),
                matches=cooked.matches,
                read=cooked.read,
                write=cooked.write,
            ),
            Format(
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
