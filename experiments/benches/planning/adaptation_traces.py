"""Returns the pairs of traces, recorded ones and presets, on which the bench of adaptation runs, in two halves.

The policy may be developed with the half `DEVELOP`; `HELD_OUT` shows whether what was found there holds elsewhere, and
begins with other traces of each set. The folder that ``ROPEBRIDGE_TRACES`` names can hold these recorded data:

- ``wanify``: repeated measurements of the rates between eight AWS regions, numbered but without times. Assumption:
  `WANIFY_INTERVAL_S` from one number to the next. Of the pairs of regions with at least `LEAST_MEASURED` measurements,
  sorted by name, every `EVERY`-th is used; the second link has the pair's other direction.
- ``fcc``: rates of fixed broadband in the United States. Of the files, sorted by name, every `EVERY`-th is used; the
  second link has the next file. Files are shorter than an hour and start again.
- ``netlatency``: round trips between end devices in Seattle. One pair of devices in each half is used, on links
  with their nominal rates; the second link has the next pair. Assumption: `SEATTLE_INTERVAL_S`, 3 hours in 688 slices.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from experiments.benches.cases import played
from traces.formats import read_trace
from traces.generators.presets import PRESETS, preset
from traces.trace import LinkTrace

DURATION_S = 3600.0
EVERY = 20
LEAST_MEASURED = 300
WANIFY_INTERVAL_S = 6.0
SEATTLE_INTERVAL_S = 3 * 3600 / 688

DEVELOP, HELD_OUT = "develop", "held out"

# By half: seeds of the presets on the two links, and the first of the recorded traces that are used.
SEEDS = {DEVELOP: (11, 12), HELD_OUT: (21, 22)}
FIRST = {DEVELOP: 0, HELD_OUT: 5}

# A pair of traces is scaled unless the mean of its rates is within this factor of the links' nominal rates.
SCALE_FITS = 4.0


@dataclass(frozen=True, slots=True)
class TracePair:
    """The traces of two links during one run; both directions of a link have the same trace.

    Attributes:
        name: Name of the data set and of the trace.
        traces: Traces of the first and of the second link.
        scaled: Whether both were scaled to the links' nominal rates.
    """

    name: str
    traces: tuple[LinkTrace, LinkTrace]
    scaled: bool


def trace_pairs(half: str, folder: Path | None, nominal_bps: tuple[float, float]) -> Iterator[TracePair]:
    """Yield a half's pairs of traces for links with two nominal rates: presets, and those in a folder, if any."""
    for name in PRESETS:
        first, second = (preset(name, duration_s=DURATION_S, seed=seed) for seed in SEEDS[half])
        yield _fitted(f"preset {name}", first, second, nominal_bps)
    if folder is None:
        return
    start = FIRST[half]
    for name, first, second in (*_wanify(folder, start), *_broadband(folder, start)):
        yield _fitted(name, first, second, nominal_bps)
    yield from _round_trips(folder, start, nominal_bps)


def _fitted(name: str, first: LinkTrace, second: LinkTrace, nominal_bps: tuple[float, float]) -> TracePair:
    """Return the pair of traces; scale each to its link's nominal rate if their rates are far from it."""
    ratio = (first.mean_bps + second.mean_bps) / sum(nominal_bps)
    if 1 / SCALE_FITS <= ratio <= SCALE_FITS:
        return TracePair(name, (first, second), scaled=False)
    scaled = (played(first, nominal_bps[0]), played(second, nominal_bps[1]))
    return TracePair(name, scaled, scaled=True)


def _wanify(folder: Path, start: int) -> Iterator[tuple[str, LinkTrace, LinkTrace]]:
    path = folder / "wanify" / "dynamic.csv"
    if not path.is_file():
        return
    measured: defaultdict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    with path.open() as file:
        for row in csv.DictReader(file):
            measured[row["src_region"], row["dst_region"]][int(row["sample"])] = float(row["received_mbps"])
    often = sorted(pair for pair, rates in measured.items() if len(rates) >= LEAST_MEASURED)
    for source, target in often[start::EVERY]:
        there, back = _numbered(measured[source, target]), _numbered(measured[target, source])
        yield f"wanify {source} {target}", there, back


def _numbered(rates: dict[int, float]) -> LinkTrace:
    numbers = sorted(rates)
    times_s = WANIFY_INTERVAL_S * np.array([number - numbers[0] for number in numbers], np.float64)
    rates_bps = 1e6 * np.array([rates[number] for number in numbers])
    return LinkTrace(times_s, rates_bps, float(times_s[-1]) + WANIFY_INTERVAL_S)


def _broadband(folder: Path, start: int) -> Iterator[tuple[str, LinkTrace, LinkTrace]]:
    inside = folder / "fcc_mba_2016" / "traces"
    paths = sorted(inside.iterdir()) if inside.is_dir() else []
    for one, other in islice(pairwise(paths), start, None, EVERY):
        number = one.name.removeprefix("trace_").partition("_")[0]
        yield f"fcc {number}", read_trace(one), read_trace(other)


def _round_trips(folder: Path, start: int, nominal_bps: tuple[float, float]) -> Iterator[TracePair]:
    path = folder / "netlatency" / "seattle_24nodes_688slices.npz"
    if not path.is_file():
        return
    rtt_s = np.load(path)["rtt"].astype(np.float64)
    pairs = pairwise((one, other) for one in range(rtt_s.shape[1]) for other in range(one))
    for pair in islice(pairs, EVERY // 2 * start, None, EVERY**2):
        series = [rtt_s[:, one, other] / 2 for one, other in pair]
        times_s = SEATTLE_INTERVAL_S * np.arange(len(rtt_s), dtype=np.float64)
        first, second = (
            LinkTrace(
                times_s, np.full(len(times_s), rate_bps, np.float64), SEATTLE_INTERVAL_S * len(times_s), latency_s
            )
            for rate_bps, latency_s in zip(nominal_bps, series, strict=True)
        )
        yield TracePair(f"netlatency {pair[0][0]} {pair[0][1]}", (first, second), scaled=False)
