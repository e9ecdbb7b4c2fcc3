"""Adds measured links to cluster files, whose hand-written content stays as it is."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.util import load_yaml_guess_indent

from planner.files.cluster import ClusterEntry
from planner.files.documents import Document, read_text
from planner.files.parsing import parse
from planner.scenario.size_curve import SizeCurve
from traces.common.atomic import check_place, write_text_atomically
from traces.common.errors import InputError, unknown_name

# Keys of a link that a measurement sets; all others in its entry are hand-written.
_MEASURED = ("bandwidth", "latency", "jitter", "size_curve")
_ENDS = ("between", "from", "to", "inside")

# Relative difference below which both directions become one link.
_ALIKE = 0.05

_MOST_WIDTH = 10_000


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A measured network path in one direction, between two regions, hosts or devices.

    Attributes:
        bandwidth_bps: Rate of frames, headers included, bits per second.
        latency_s: One-way latency, seconds; if there is jitter, the latency of the quickest packet.
        jitter_s: Largest additional delay of a packet, seconds.
        size_curve: Rate of a message by its size; None if latency and bandwidth determine the rate.
    """

    source: str
    target: str
    bandwidth_bps: float
    latency_s: float
    jitter_s: float = 0.0
    size_curve: SizeCurve | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """Return the names of source and target."""
        return self.source, self.target


def check_cluster_file(path: Path, ends: Sequence[str]) -> None:
    """Check, before a measurement, that `add_links` will be able to write links between these ends.

    Raises:
        InputError: The file is no cluster file, it does not contain the ends, or it cannot be written.
    """
    if path.suffix == ".json":
        raise InputError("a cluster file is YAML, not JSON", str(path), "let its name end in .yaml")
    check_place(path)
    if not path.exists():
        return
    document = Document(path)
    if isinstance(document.value, Mapping) and "cluster" in document.value:
        raise InputError(
            "this is a whole scenario", str(path), "give its cluster a file of its own, and write 'cluster: FILE' there"
        )
    entry = parse(ClusterEntry, document, document.value)
    known = dict.fromkeys(
        name for device in entry.devices for name in (device.region, device.host, device.name) if name is not None
    )
    for name in ends if known else ():
        if name not in known:
            raise unknown_name("region, host or device", name, known, where=str(path))


def add_links(path: Path, there: MeasuredLink, back: MeasuredLink) -> list[str]:
    """Write both measured directions of a link into a cluster file, in place of the file's entries for the link.

    Prices and losses in the file stay, and so do traces, which describe a bandwidth better than one measurement. If
    there is no file, one without devices is created.

    Returns:
        A sentence for each direction whose trace was kept in place of the measured bandwidth.

    Raises:
        InputError: See `check_cluster_file`.
    """
    check_cluster_file(path, (there.source, there.target))
    content: Any = CommentedMap(devices=[], links=[])
    indent, offset = 4, 2
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = _MOST_WIDTH
    if path.exists():
        content, found_indent, found_offset = load_yaml_guess_indent(read_text(path), yaml=yaml)
        indent, offset = found_indent or indent, offset if found_offset is None else found_offset
    if content.get("links") is None:
        content["links"] = []
    kept = _replace(content["links"], there, back)
    yaml.indent(mapping=2, sequence=indent, offset=offset)
    text = io.StringIO()
    yaml.dump(content, text)
    write_text_atomically(path, text.getvalue())
    return kept


def _replace(links: list[Any], there: MeasuredLink, back: MeasuredLink) -> list[str]:
    """Replace the old entries of a link by the new ones, at the place of the first old one or at the end."""
    old = [index for index, entry in enumerate(links) if _pairs(entry) & {there.pair, back.pair}]
    place = old[0] if old else len(links)
    before = {pair: links[index] for index in old for pair in _pairs(links[index])}
    new = {pair: _entry(link, before.get(pair, {})) for link in (there, back) for pair in [link.pair]}
    notes = [
        f"{link.source} to {link.target}: the file's trace stays, in place of the bandwidth measured here"
        for link in (there, back)
        if "trace" in new[link.pair]
    ]
    for index in reversed(old):
        del links[index]
    for entry in reversed(_joined(new, there, back)):
        entry.fa.set_flow_style()
        links.insert(place, entry)
    return notes


def _pairs(entry: Any) -> set[tuple[str, str]]:
    """Return the directions, as (source, target), that an entry of the file describes."""
    if "between" in entry:
        first, second = entry["between"]
        return {(first, second), (second, first)}
    return {(entry["from"], entry["to"])} if "from" in entry else set()


def _entry(link: MeasuredLink, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a link's entry without its ends."""
    entry: dict[str, Any] = {}
    if "trace" not in before:
        entry["bandwidth"] = _rate(link.bandwidth_bps)
    entry["latency"] = _milliseconds(link.latency_s)
    if link.jitter_s:
        entry["jitter"] = _milliseconds(link.jitter_s)
    if link.size_curve is not None:
        curve = link.size_curve
        terms = {name: float(f"{getattr(curve, name):.6g}") for name in ("quadratic", "linear", "constant")}
        entry["size_curve"] = {**terms, "ceiling": _rate(curve.ceiling_bps)}
    return {**entry, **{key: value for key, value in before.items() if key not in (*_ENDS, *_MEASURED)}}


def _joined(
    new: Mapping[tuple[str, str], dict[str, Any]], there: MeasuredLink, back: MeasuredLink
) -> list[CommentedMap]:
    """Return one entry for both directions if they differ by less than `_ALIKE` in the rate, else one entry each."""
    first, second = new[there.pair], new[back.pair]
    rates = sorted((there.bandwidth_bps, back.bandwidth_bps))
    without = [{key: value for key, value in each.items() if key not in _MEASURED} for each in (first, second)]
    if rates[0] >= (1 - _ALIKE) * rates[1] and without[0] == without[1]:
        # The entry has the rate of the slower direction, which a plan can count on both ways.
        slower = first if there.bandwidth_bps <= back.bandwidth_bps else second
        return [CommentedMap({"between": [there.source, there.target], **slower})]
    return [CommentedMap({"from": link.source, "to": link.target, **new[link.pair]}) for link in (there, back)]


def _rate(rate_bps: float) -> str:
    return f"{rate_bps / 1e6:.4g} Mbit/s" if rate_bps < 1e9 else f"{rate_bps / 1e9:.4g} Gbit/s"


def _milliseconds(time_s: float) -> str:
    return f"{1000 * time_s:.4g} ms"
