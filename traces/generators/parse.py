"""Any made-up trace by the name of its preset or generator, with parameters as people write them."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from traces import generators
from traces.common.errors import InputError
from traces.common.names import find_by_name
from traces.common.units import parse_bandwidth_bps, parse_duration_s
from traces.generators.presets import PRESETS, preset
from traces.trace import LinkTrace

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
        parameters: Those of the generator, without the unit in their names but with one in their values:
            ``{"bandwidth": "10 Mbit/s", "start": "5 s", "length": "500 ms"}``. Lists are pairs:
            ``{"points": "0 s: 10 Mbit/s, 30 s: 0 bit/s"}``, ``{"states": "10 Mbit/s: 5 s, 1 Mbit/s: 2 s"}``.
        duration_s: Seconds.
        seed: The same seed makes the same trace; for those that leave something to chance.
        step_s: Length of a piece, seconds; for those that have steps.

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
