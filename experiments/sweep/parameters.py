"""The parameters of a sweep, whose values are those of a grid or a list, or random draws."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from planner.files.parsing import STRICT
from traces.common.errors import InputError

# Kinds of random parameters.
RANDOM = ("uniform", "loguniform", "integers", "choice")

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*\Z")


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """The values of a parameter in a sweep file: exactly one of the keys below.

    Attributes:
        grid: Values that are combined with every value of every other parameter.
        together: Values of a list (``list`` in the file); all lists advance together.
        uniform: Two numbers, or two quantities with the same unit, between which values are drawn uniformly.
        loguniform: Two such bounds, between which the logarithm of the values is drawn uniformly.
        integers: The smallest and the largest whole number that can be drawn.
        choice: Values of which one is drawn with equal probability.
    """

    grid: tuple[Any, ...] | None = None
    together: Annotated[tuple[Any, ...] | None, Field(alias="list")] = None
    uniform: tuple[float | str, float | str] | None = None
    loguniform: tuple[float | str, float | str] | None = None
    integers: tuple[int, int] | None = None
    choice: tuple[Any, ...] | None = None

    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that has been checked.

    Attributes:
        name: A path into the scenario or the plan, or a setting of the run.
        kind: ``grid``, ``list``, or one of `RANDOM`.
        values: The values as written in the file; for a range, both bounds.
        draw: Maps a uniform random number in [0, 1) to a value; None for a parameter that is not random.
    """

    name: str
    kind: str
    values: tuple[Any, ...]
    draw: Callable[[float], Any] | None = field(default=None, compare=False)

    def drawn(self, seed: int, number: int) -> Any:
        """Return the value of draw ``number``, counted from 0.

        The value depends only on the seed, the parameter's name and the number: every combination of the other
        parameters gets the same draws, and further draws do not change earlier ones.
        """
        assert self.draw is not None
        digest = hashlib.sha256(json.dumps([seed, self.name, number]).encode()).digest()
        # A float has 53 bits of precision; with more bits the quotient could be rounded to 1.
        return self.draw((int.from_bytes(digest[:8]) >> 11) / 2**53)


def checked_parameter(name: str, entry: ParameterEntry, where: str) -> Parameter:
    """Check an entry of the file, and return its parameter.

    Raises:
        InputError: The entry has several kinds of values or none, or the values are not valid.
    """
    fields: Mapping[str, Sequence[Any] | None] = {
        "grid": entry.grid,
        "list": entry.together,
        **{kind: getattr(entry, kind) for kind in RANDOM},
    }
    given = [kind for kind, values in fields.items() if values is not None]
    if len(given) != 1:
        found = f"gives {' and '.join(given)}" if given else "has no values"
        raise InputError(f"the parameter {found}", where=where, valid=f"give one of {', '.join(fields)}")
    (kind,) = given
    values = tuple(fields[kind] or ())
    if not values:
        raise InputError(f"the {kind} is empty", where=f"{where}.{kind}", valid="give at least one value")
    if kind in ("grid", "choice"):
        _refuse_twice(values, f"{where}.{kind}")
    if kind not in RANDOM:
        return Parameter(name, kind, values)
    return Parameter(name, kind, values, _drawing(kind, values, f"{where}.{kind}"))


def canonical(value: Any) -> str:
    """Return the canonical JSON text of a value, which is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _refuse_twice(values: Sequence[Any], where: str) -> None:
    seen: set[str] = set()
    for value in values:
        text = canonical(value)
        if text in seen:
            raise InputError(f"{text} is given twice", where=where, valid="give each value once")
        seen.add(text)


def _drawing(kind: str, values: tuple[Any, ...], where: str) -> Callable[[float], Any]:
    if kind == "choice":
        return lambda share: values[int(share * len(values))]
    if kind == "integers":
        first, last = values
        if last < first:
            raise InputError(
                f"no whole number is between {first} and {last}", where=where, valid="give the smaller one first"
            )
        return lambda share: first + int(share * (last - first + 1))
    (low, unit), (high, other_unit) = (_quantity(value, where) for value in values)
    if unit != other_unit:
        raise InputError(
            f"the units of {values[0]!r} and {values[1]!r} differ", where=where, valid="give both in the same unit"
        )
    if not low < high:
        raise InputError(f"{values[0]!r} is not below {values[1]!r}", where=where, valid="give the smaller one first")
    if kind == "loguniform":
        if low <= 0:
            raise InputError(f"{values[0]!r} has no logarithm", where=where, valid="give bounds above zero")
        return lambda share: _text(math.exp(math.log(low) + share * math.log(high / low)), unit)
    return lambda share: _text(low + share * (high - low), unit)


def _quantity(value: float | str, where: str) -> tuple[float, str]:
    match = _QUANTITY.match(str(value))
    if match is None:
        raise InputError(f"{value!r} is no bound", where=where, valid="write a number, or one with a unit: '50 Mbit/s'")
    return float(match[1]), match[2]


def _text(number: float, unit: str) -> float | str:
    # Rounded, since the last digits of a logarithm differ between machines.
    rounded = float(f"{number:.12g}")
    return f"{rounded!r} {unit}" if unit else rounded
