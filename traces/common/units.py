"""Parses quantities with units (`40 ms`, `1 Gbit/s`, `16 GiB`) to numbers in SI units.

A bare number is refused: a unit is never guessed.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType

from traces.common.errors import InputError

SECONDS: Mapping[str, float] = MappingProxyType(
    {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
)
BITS_PER_SECOND: Mapping[str, float] = MappingProxyType(
    {
        **{f"{prefix}bit/s": scale for prefix, scale in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9))},
        **{f"{prefix}B/s": 8 * scale for prefix, scale in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9))},
    }
)
BYTES: Mapping[str, float] = MappingProxyType(
    {
        "B": 1.0,
        **{f"{prefix}B": 10.0**power for prefix, power in (("k", 3), ("M", 6), ("G", 9), ("T", 12))},
        **{f"{prefix}iB": 2.0**power for prefix, power in (("K", 10), ("M", 20), ("G", 30), ("T", 40))},
    }
)
FLOP: Mapping[str, float] = MappingProxyType({"FLOP": 1.0, "kFLOP": 1e3, "MFLOP": 1e6, "GFLOP": 1e9, "TFLOP": 1e12})
FLOP_PER_SECOND: Mapping[str, float] = MappingProxyType({f"{unit}/s": scale for unit, scale in FLOP.items()})
BYTES_PER_SECOND: Mapping[str, float] = MappingProxyType({f"{unit}/s": scale for unit, scale in BYTES.items()})

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*\Z")


def parse_quantity(text: object, units: Mapping[str, float], example: str, where: str = "") -> float:
    """Return a number with a unit, such as ``"40 ms"``, in the SI unit.

    ``units`` gives the factor that converts a unit to the SI unit. For the message, ``example`` is a valid quantity and
    ``where`` says where the text is, for example the option of the command.

    Raises:
        InputError: The text is not a number with one of the units, or the number is negative or not finite.
    """
    valid = f"write a number with one of {', '.join(units)}, for example '{example}'"
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise InputError(f"{text!r} is not a quantity", where, valid)
    match = _QUANTITY.match(str(text))
    if match is None:
        raise InputError(f"{text!r} is not a quantity", where, valid)
    number, unit = match.groups()
    if not unit:
        raise InputError(f"{text!r} has no unit", where, valid)
    if unit not in units:
        raise InputError(f"{text!r} has the unknown unit '{unit}'", where, valid)
    value = float(number) * units[unit]
    if value < 0 or not math.isfinite(value):
        in_range = f"it must be finite and not negative, for example '{example}'"
        raise InputError(f"{text!r} is out of range", where, in_range)
    return value


def parse_duration_s(text: object, where: str = "") -> float:
    """Return a duration such as ``40 ms`` in seconds; ``where`` is that of `parse_quantity`."""
    return parse_quantity(text, SECONDS, "40 ms", where)


def parse_bandwidth_bps(text: object) -> float:
    """Return a rate such as ``1 Gbit/s`` in bits per second."""
    return parse_quantity(text, BITS_PER_SECOND, "100 Mbit/s")


def parse_bytes(text: object, where: str = "") -> int:
    """Return an amount of memory such as ``16 GiB`` in whole bytes; ``where`` is that of `parse_quantity`."""
    return round(parse_quantity(text, BYTES, "16 GiB", where))


def parse_flop(text: object) -> float:
    """Return an amount of work such as ``12.9 GFLOP`` in floating-point operations."""
    return parse_quantity(text, FLOP, "12.9 GFLOP")


def parse_flop_per_second(text: object) -> float:
    """Return a compute rate such as ``19.5 TFLOP/s`` in operations per second."""
    return parse_quantity(text, FLOP_PER_SECOND, "19.5 TFLOP/s")


def parse_bytes_per_second(text: object) -> float:
    """Return a memory rate such as ``900 GB/s`` in bytes per second."""
    return parse_quantity(text, BYTES_PER_SECOND, "900 GB/s")


def size_text(size_bytes: int) -> str:
    """Return a size as text in B, MiB or GiB, such as ``3.20 GiB``."""
    if size_bytes < 2**20:
        return f"{size_bytes} B"
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.2f} MiB"


def number_text(value: float) -> str:
    """Return ``value`` with three significant digits, thousands separators and no exponent, such as ``1,230``."""
    return f"{Decimal(f'{value:.3g}'):,f}"
