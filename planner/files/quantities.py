"""The types of values in files: quantities are text with a unit, checked where it stands, an SI number once read."""

import math
from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from planner.files.parsing import reported
from traces.common.errors import InputError
from traces.common.units import (
    parse_bandwidth_bps,
    parse_bytes,
    parse_bytes_per_second,
    parse_duration_s,
    parse_flop,
    parse_flop_per_second,
)


def _text(example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": [example]})


def _above_zero(convert: Callable[[object], float]) -> Callable[[object], float]:
    """The same conversion for a rate that something is divided by."""

    def checked(text: object) -> float:
        value = convert(text)
        if value <= 0:
            raise InputError(f"{text!r} is out of range", valid="it must be above zero")
        return value

    return checked


def _bytes_or_unlimited(text: object) -> float:
    return math.inf if text == "unlimited" else float(parse_bytes(text))


Seconds = Annotated[float, BeforeValidator(reported(parse_duration_s)), _text("40 ms")]
BitsPerSecond = Annotated[float, BeforeValidator(reported(parse_bandwidth_bps)), _text("100 Mbit/s")]
Bytes = Annotated[int, BeforeValidator(reported(parse_bytes)), _text("16 GiB")]
BytesOrUnlimited = Annotated[
    float,
    BeforeValidator(reported(_bytes_or_unlimited)),
    WithJsonSchema({"type": "string", "examples": ["4 MB", "unlimited"]}),
]
BytesPerSecond = Annotated[float, BeforeValidator(reported(_above_zero(parse_bytes_per_second))), _text("900 GB/s")]
Flop = Annotated[float, BeforeValidator(reported(parse_flop)), _text("12.9 GFLOP")]
FlopPerSecond = Annotated[float, BeforeValidator(reported(_above_zero(parse_flop_per_second))), _text("19.5 TFLOP/s")]

# Values without a unit.
Number = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Names stand in messages, tables and file names: some text, on one line.
Name = Annotated[str, Field(pattern=r"^\S(.*\S)?$", max_length=100)]
