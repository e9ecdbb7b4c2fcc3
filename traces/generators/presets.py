"""Traces by the name of a generator or a preset; presets are calibrated to published measurements of real paths."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from traces import generators
from traces.common.errors import InputError, find_by_name
from traces.common.units import parse_bandwidth_bps, parse_duration_s
from traces.generators import ornstein_uhlenbeck, with_outage_bursts
from traces.trace import LinkTrace


@dataclass(frozen=True)
class Preset:
    """Statistics of a kind of path.

    The rate is an Ornstein-Uhlenbeck process (`ornstein_uhlenbeck`), interrupted by outages if ``zero_share`` is above
    0 (`with_outage_bursts`). The sources give means and spreads of one-second samples, but no correlation over time:
    ``correlation_s`` and ``mean_outage_s`` are assumptions.

    Attributes:
        mean_bps: Mean rate, bits per second, outages included.
        coefficient_of_variation: Standard deviation as a share of the mean, outages included.
        correlation_s: Lag at which the autocorrelation of the rate's logarithm is 1/e, seconds.
        maximum_bps: Highest rate, bits per second; infinity where none was published.
        mean_outage_s: Mean length of an outage, seconds.
    """

    mean_bps: float
    coefficient_of_variation: float
    correlation_s: float
    source: str
    maximum_bps: float = math.inf
    zero_share: float = 0.0
    mean_outage_s: float = 3.0


# Mean rate in bits per second, coefficient of variation, correlation in seconds, and the source of the first two.
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "cloud-wan": Preset(
            630e6,
            0.03,
            60.0,
            "cloud path California - Stanford: steady, 590-670 Mbit/s, taken as 4 standard deviations",
        ),
        "cloud-wan-mexico": Preset(
            92e6, 0.03, 60.0, "cloud path California - Mexico: mean 92 Mbit/s; assumed as steady as cloud-wan"
        ),
        "cloud-wan-colombia": Preset(
            68e6, 0.13, 60.0, "cloud path Brazil - Colombia: 50-86 Mbit/s, taken as 4 standard deviations"
        ),
        "lte": Preset(32e6, 0.44, 10.0, "Ghent LTE: mean 32 Mbit/s, CV 0.44"),
        "5g": Preset(
            30e6, 1.43, 10.0, "Irish 5G, download: mean 30 Mbit/s, CV 1.43, maximum 533 Mbit/s", maximum_bps=533e6
        ),
        "5g-mmwave": Preset(
            501e6, 0.87, 5.0, "Lumos 5G mmWave: mean 501 Mbit/s, CV 0.87, maximum 1,920 Mbit/s", maximum_bps=1_920e6
        ),
        "hsdpa": Preset(1.35e6, 0.35, 10.0, "Norway HSDPA: mean 1.35 Mbit/s, CV 0.35"),
        "rail-lte": Preset(6.7e6, 0.79, 10.0, "LTE on high-speed rail: mean 6.7 Mbit/s, CV 0.79"),
        "satellite": Preset(
            128e6,
            0.71,
            15.0,
            "Starlink in motion, UDP download: mean 128 Mbit/s, CV 0.71, 16 % of the seconds at zero",
            zero_share=0.16,
        ),
    }
)
"""Preset name to preset."""


def preset(name: str, *, duration_s: float, seed: int, step_s: float = 1.0) -> LinkTrace:
    """Return a trace of a named kind of path.

    Raises:
        InputError: There is no such preset, or a time is not positive.
    """
    chosen = find_by_name(name, PRESETS, "preset")
    between = _between_outages(chosen)
    rate_seed, outage_seed = np.random.SeedSequence(seed).spawn(2)
    trace = ornstein_uhlenbeck(
        between.mean_bps,
        coefficient_of_variation=between.coefficient_of_variation,
        correlation_s=between.correlation_s,
        maximum_bps=between.maximum_bps,
        duration_s=duration_s,
        seed=rate_seed,
        step_s=step_s,
    )
    return with_outage_bursts(
        trace,
        zero_share=chosen.zero_share,
        mean_outage_s=chosen.mean_outage_s,
        seed=outage_seed,
        step_s=step_s,
    )


def _between_outages(whole: Preset) -> Preset:
    """Return the statistics of a path between its outages.

    With u the share of time outside of outages, the mean over the whole time is u times the mean between outages; the
    same holds for the mean square.
    """
    up_share = 1 - whole.zero_share
    return dataclasses.replace(
        whole,
        mean_bps=whole.mean_bps / up_share,
        coefficient_of_variation=math.sqrt((1 + whole.coefficient_of_variation**2) * up_share - 1),
        zero_share=0.0,
    )


GENERATORS: Mapping[str, Callable[..., LinkTrace]] = MappingProxyType(
    {
        "constant": generators.constant,
        "step": generators.step,
        "outage": generators.outage,
        "diurnal": generators.diurnal,
        "markov": generators.markov,
        "ornstein-uhlenbeck": generators.ornstein_uhlenbeck,
    }
)
"""Generator name to generator."""


def generate(name: str, parameters: Mapping[str, str], *, duration_s: float, seed: int, step_s: float) -> LinkTrace:
    """Return a trace of a preset or a generator.

    Args:
        name: A key of ``PRESETS`` or ``GENERATORS``.
        parameters: Parameters of the generator by name without the unit suffix; their values are texts with a unit:
            ``{"bandwidth": "10 Mbit/s", "start": "5 s", "length": "500 ms"}``. Lists are pairs: ``{"points": "0 s: 10
            Mbit/s, 30 s: 0 bit/s"}``, ``{"states": "10 Mbit/s: 5 s, 1 Mbit/s: 2 s"}``.
        duration_s: Duration of the trace, seconds.
        seed: Seed of generators that are random; the same seed makes the same trace.
        step_s: Length of a piece, seconds, for generators that have such a parameter.

    Raises:
        InputError: There is no such name, a parameter is unknown, missing or wrong.
    """
    find_by_name(name, {**PRESETS, **GENERATORS}, "preset or generator")
    common = {"duration_s": duration_s, "seed": seed, "step_s": step_s}
    if name in PRESETS:
        _parse({}, parameters, name)
        return preset(name, duration_s=duration_s, seed=seed, step_s=step_s)
    accepted = inspect.signature(GENERATORS[name]).parameters
    own = {key: found for key, found in accepted.items() if key not in common}
    shared = {key: value for key, value in common.items() if key in accepted}
    return GENERATORS[name](**_parse(own, parameters, name), **shared)


def _parse(accepted: Mapping[str, inspect.Parameter], given: Mapping[str, str], name: str) -> dict[str, Any]:
    written = {key.removesuffix("_bps").removesuffix("_s"): key for key in accepted}
    valid = f"it takes {', '.join(written) or 'none'}"
    for key in given:
        if key not in written:
            raise InputError(f"'{name}' has no parameter '{key}'", valid=valid)
    for key, full_key in written.items():
        if key not in given and accepted[full_key].default is inspect.Parameter.empty:
            raise InputError(f"'{name}' lacks the parameter '{key}'", valid=valid)
    return {written[key]: _parse_one(written[key], text) for key, text in given.items()}


def _parse_one(key: str, text: str) -> object:
    try:
        if key == "points":
            return [(parse_duration_s(time), parse_bandwidth_bps(rate)) for time, rate in _pairs(text)]
        if key == "states":
            return [(parse_bandwidth_bps(rate), parse_duration_s(dwell)) for rate, dwell in _pairs(text)]
        if key.endswith("_bps"):
            return parse_bandwidth_bps(text)
        return parse_duration_s(text) if key.endswith("_s") else _parse_number(text)
    except InputError as error:
        raise error.within(key.removesuffix("_bps").removesuffix("_s")) from error


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for item in text.split(","):
        first, colon, second = item.partition(":")
        if not colon:
            raise InputError(f"'{item.strip()}' is not a pair", valid="write pairs as 'a: b, c: d'")
        pairs.append((first, second))
    return pairs


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"'{text}' is not a number", valid="write one without a unit, such as 0.5") from None
