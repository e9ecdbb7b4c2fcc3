"""Checks that a plan made by foreign code consists of the types that `planner.plan.plan` declares.

Python does not hold a strategy or policy to the types of a plan's fields: it could return a list for a tuple, text for
a number or NaN for a share, which would fail far from its cause.
"""

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from planner.plan.plan import SCHEMA_VERSION, Plan
from traces.common.errors import InputError, shown

# Beyond this a whole number is not exact as a float.
LARGEST_INTEGER = 2**53

# Most characters of a name in a plan.
MOST_CHARACTERS = 1000


def check_types(value: object) -> Plan:
    """Return ``value`` if it is a plan, every field of which has its declared type and finite numbers.

    Raises:
        InputError: It is not; the message names the first wrong field, such as ``pipelines[0].microbatches``.
    """
    _check(value, Plan, "")
    assert type(value) is Plan
    if value.version != SCHEMA_VERSION:
        raise InputError(f"{value.version} is not allowed", where="version", valid=f"leave it at {SCHEMA_VERSION}")
    return value


def _check(value: object, kind: Any, where: str) -> None:
    if get_origin(kind) is tuple:
        entry, _ = get_args(kind)
        if type(value) is not tuple:
            raise _wrong(value, where, f"give a tuple of {_named(entry)}")
        for index, each in enumerate(value):
            _check(each, entry, f"{where}[{index}]")
    elif isinstance(kind, UnionType):
        if value is not None:
            (given,) = (each for each in get_args(kind) if each is not NoneType)
            _check(value, given, where)
    elif is_dataclass(kind):
        if type(value) is not kind:
            raise _wrong(value, where, f"give a {_named(kind)}")
        for name, declared in _declared(kind):
            # An object whose class was called with no regard for its constructor can lack a field.
            _check(getattr(value, name, None), declared, f"{where}.{name}" if where else name)
    elif not _is_allowed(value, kind):
        raise _wrong(value, where, _RULES.get(kind) or f"give a {_named(kind)}")


@cache
def _declared(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the names and types of the fields of a dataclass."""
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


_RULES = {
    bool: "give True or False",
    int: "give a whole number of type int, 2**53 at most",
    float: "give a finite number of type float",
    str: f"give text of at most {MOST_CHARACTERS} characters",
}


def _is_allowed(value: object, kind: type) -> bool:
    if kind is int:
        return type(value) is int and abs(value) <= LARGEST_INTEGER
    if kind is float:
        is_number = isinstance(value, float) or (type(value) is int and abs(value) <= LARGEST_INTEGER)
        return is_number and math.isfinite(value)  # type: ignore[arg-type]
    if kind is str:
        # Halves of surrogate pairs are in no file.
        return isinstance(value, str) and len(value) <= MOST_CHARACTERS and (value.isascii() or _is_unicode(value))
    return type(value) is kind


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _wrong(value: object, where: str, valid: str) -> InputError:
    return InputError(f"{shown(value)} is not allowed", where=where, valid=valid)


def _named(kind: Any) -> str:
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Enum)):
        return f"{kind.__module__}.{kind.__qualname__}"
    return str(getattr(kind, "__name__", kind))
