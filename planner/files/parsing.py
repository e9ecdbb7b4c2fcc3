"""Parsing of a document's values into dataclasses; errors name file, line, key, value and what would be valid."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from planner.files.documents import Document, Location
from traces.common.errors import InputError, unknown_name
from traces.common.units import (
    parse_bandwidth_bps,
    parse_bytes,
    parse_bytes_per_second,
    parse_duration_s,
    parse_flop,
    parse_flop_per_second,
)

Data = TypeVar("Data")

# Every dataclass that is read from a file refuses unknown keys and silent conversions.
STRICT = ConfigDict(extra="forbid", strict=True)

# A number with an exponent that YAML 1.1 takes for text, since it has no point or the exponent no sign.
_NUMBER = re.compile(r"[-+]?[0-9]{1,20}(\.[0-9]{0,20})?[eE][-+]?[0-9]{1,3}$")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def file_entry(kind: type[Data]) -> type[Data]:
    """Turn a class into a frozen, keyword-only dataclass that `parse` reads without unknown keys or conversions."""
    setattr(kind, "__pydantic_config__", STRICT)  # noqa: B010
    return dataclass(frozen=True, kw_only=True)(kind)


_UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")
_MISSING = ("missing", "missing_argument")
_KEYED = ("dict_type", "dataclass_type")


def parse(kind: type[Data], document: Document, value: Any, location: Location = ()) -> Data:
    """Return ``value``, found at ``location`` of the document, as a ``kind``.

    Raises:
        InputError: The value does not fit ``kind``; the message is about the first mistake.
    """
    try:
        # Through JSON, since pydantic's strict mode accepts a list for a tuple and text for a path only from JSON.
        text = json.dumps(value, default=str)
    except (RecursionError, ValueError) as error:
        where, valid = document.where(location), "remove references of a value to itself"
        raise InputError(f"this cannot be read: {error}", where=where, valid=valid) from None
    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        raise _first_error(error, kind, document, value, location) from None


def _adapter(kind: type[Data]) -> TypeAdapter[Data]:
    """Return an adapter, cached for dataclasses, because making an adapter takes longer than reading many files."""
    return cached_adapter(kind) if isinstance(kind, type) and is_dataclass(kind) else TypeAdapter(kind)


@cache
def cached_adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return the adapter of a type, which is made at the first call for this type."""
    return TypeAdapter(kind)


def reported(convert: Any) -> Any:
    """Return a validator that calls ``convert``; an `InputError` becomes an error whose place pydantic reports."""

    def validate(value: object) -> Any:
        try:
            return convert(value)
        except InputError as error:
            # The message is a value, not part of the template: pydantic would take its braces for placeholders.
            raise PydanticCustomError("input", "{problem}", {"problem": error.problem, "valid": error.valid}) from None

    return validate


def _first_error(error: ValidationError, kind: type, document: Document, value: Any, location: Location) -> InputError:
    # An unknown key is reported before a missing one, because a misspelt key causes both.
    found = [(each, _inside(value, each["loc"], each["type"])) for each in error.errors(include_url=False)]
    details, inner = min(found, key=lambda each: each[0]["type"] not in _UNKNOWN_KEY)
    # A value that is no member of a union has an error for each: the one that is furthest inside is the mistake.
    within = [each for each in found if each[1][: len(inner)] == inner]
    if details["type"] not in _UNKNOWN_KEY:
        details, inner = max(within, key=lambda each: len(each[1]))
    where = document.where((*location, *inner))
    if details["type"] in _UNKNOWN_KEY:
        # A key that YAML takes for a number or for true has another name here, and is not found in the value.
        name = str(details["loc"][-1])
        known = inner[:-1] if inner and inner[-1] == name else inner
        return unknown_name("key", name, keys_at(kind, known), where=where)
    if details["type"] == "input":
        context = details["ctx"]
        return InputError(context["problem"], where=where, valid=context["valid"])
    if details["type"] in _MISSING:
        return InputError(f"the key '{inner[-1]}' is missing", where=where, valid=f"add '{inner[-1]}:' there")
    valid = details["msg"][0].lower() + details["msg"][1:]
    if details["type"] == "float_type" and isinstance(details["input"], str) and _NUMBER.match(details["input"]):
        valid = f"write {yaml.safe_dump(float(details['input'])).split()[0]}: YAML takes a number of this form for text"
    if isinstance(details["input"], list) and details["type"] in _KEYED:
        return InputError("a list is not valid", where=where, valid="give keys with values, as 'NAME: ...'")
    if details["input"] is None:
        # A key of which all entries are commented out has no value, either.
        return InputError("there is no value", where=where, valid=valid)
    text = repr(details["input"])
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return InputError(f"{shown} is not valid", where=where, valid=valid)


def _inside(value: Any, location: Location, kind: str) -> Location:
    """Return a location without the names of union members that pydantic adds.

    Only the last key of an error of the ``kind`` that tells of a missing key need not exist in ``value``.
    """
    inner: list[int | str] = []
    for depth, key in enumerate(location):
        if _has(value, key):
            value = value[key]
        elif not (isinstance(value, dict) and kind in _MISSING and depth == len(location) - 1):
            continue
        inner.append(key)
    return tuple(inner)


def _has(value: Any, key: int | str) -> bool:
    if isinstance(value, list):
        return isinstance(key, int) and key < len(value)
    return isinstance(value, dict) and key in value


def keys_at(kind: Any, location: Location) -> list[str]:
    """Return the valid keys at a location inside a dataclass; empty if no dataclass is expected there."""
    for part in location:
        kind = type_at(kind, part)
    return [key for dataclass_ in _dataclasses(kind) for key in _field_types(dataclass_)]


def type_at(kind: Any, part: int | str) -> Any:
    """Return the type of the value at a key or index of a container type or dataclass; None if there is none."""
    if get_origin(kind) in (dict, Mapping, tuple):
        return get_args(kind)[0 if get_origin(kind) is tuple else -1]
    if isinstance(kind, type) and is_dataclass(kind):
        return _field_types(kind).get(str(part))
    return next((found for each in get_args(kind) if (found := type_at(each, part)) is not None), None)


def _field_types(kind: type) -> Mapping[str, Any]:
    """Return the type of each field of a dataclass, by the field's key in a file."""
    hints = get_type_hints(kind, include_extras=True)
    types: dict[str, Any] = {}
    for each in fields(kind):
        hint = hints[each.name]
        infos = [info for info in getattr(hint, "__metadata__", ()) if isinstance(info, FieldInfo)]
        types[next((info.alias for info in infos if info.alias), each.name)] = hint
    return types


def _dataclasses(kind: Any) -> Iterator[type]:
    """Yield the dataclasses of a type such as ``Entry | None``."""
    if isinstance(kind, type) and is_dataclass(kind):
        yield kind
    elif get_origin(kind) not in (dict, Mapping, tuple):
        for argument in get_args(kind):
            yield from _dataclasses(argument)


def _text(example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "examples": [example]})


def _above_zero(convert: Callable[[object], float]) -> Callable[[object], float]:
    """Return ``convert`` with a check that the result, a rate by which other code divides, is above zero."""

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
# Text on one line; names appear in messages, tables and file names.
Name = Annotated[str, Field(pattern=r"^\S(.*\S)?$", max_length=100)]


class Part:
    """One part of a document: the value at a location or, if that is a path, the content of the file."""

    def __init__(self, document: Document, *location: int | str) -> None:
        value = document.value
        for key in location:
            value = value[key]
        if isinstance(value, str):
            try:
                self.document = document.part(*location)
            except InputError as error:
                raise InputError(
                    f"{error.problem}: '{value}'", where=document.where(location), valid=error.valid
                ) from None
            self.value, self.location = self.document.value, ()
        else:
            self.document, self.value, self.location = document, value, location

    location: Location

    def inner(self, key: str) -> "Part":
        """Return the part at a key of this part."""
        return Part(self.document, *self.location, key)

    def parse(self, kind: type[Data]) -> Data:
        """Return the part as a ``kind``; raise an InputError for the first mistake."""
        return parse(kind, self.document, self.value, self.location)

    def where(self, *inner: int | str) -> str:
        """Return file, line and key path of a place inside the part."""
        return self.document.where((*self.location, *inner))

    def path(self, name: str) -> Path:
        """Return the path ``name`` relative to the file of this part."""
        return self.document.path.parent / name
