"""The types of quantities in files: text with a unit, checked where it stands, an SI number once read."""

from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

from planner.parsing import reported
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


Seconds = Annotated[float, BeforeValidator(reported(parse_duration_s)), _text("40 ms")]
BitsPerSecond = Annotated[float, BeforeValidator(reported(parse_bandwidth_bps)), _text("100 Mbit/s")]
Bytes = Annotated[int, BeforeValidator(reported(parse_bytes)), _text("16 GiB")]
BytesPerSecond = Annotated[float, BeforeValidator(reported(parse_bytes_per_second)), _text("900 GB/s")]
Flop = Annotated[float, BeforeValidator(reported(parse_flop)), _text("12.9 GFLOP")]
FlopPerSecond = Annotated[float, BeforeValidator(reported(parse_flop_per_second)), _text("19.5 TFLOP/s")]
