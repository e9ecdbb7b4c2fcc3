"""The types of quantities in files: text with a unit, checked where it stands, an SI number once read."""

from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from planner.files.parsing import reported
from traces.errors import InputError
from traces.units import (
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


Seconds = Annotated[float, BeforeValidator(reported(parse_duration_s)), _text("40 ms")]
BitsPerSecond = Annotated[float, BeforeValidator(reported(parse_bandwidth_bps)), _text("100 Mbit/s")]
Bytes = Annotated[int, BeforeValidator(reported(parse_bytes)), _text("16 GiB")]
BytesPerSecond = Annotated[float, BeforeValidator(reported(_above_zero(parse_bytes_per_second))), _text("900 GB/s")]
Flop = Annotated[float, BeforeValidator(reported(parse_flop)), _text("12.9 GFLOP")]
FlopPerSecond = Annotated[float, BeforeValidator(reported(_above_zero(parse_flop_per_second))), _text("19.5 TFLOP/s")]
