"""A resolved scenario as JSON: all files read, all quantities in SI units, all defaults written out.

The keys are the fields of the dataclasses in `planner.scenario`. Infinite values (the end of an endless absence, the
rate of an unlimited network interface) are ``null``, since JSON has no infinity. A field that is missing, because an
older version wrote the file, gets its default.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from planner.files.documents import plain, read_json
from planner.scenario.convergence import LossLaw
from planner.scenario.faults import Absence, Fault, Hang, LinkOutage
from planner.scenario.scenario import Scenario, check_countable
from planner.scenario.size_curve import SizeCurve
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError

_FAULTS: Mapping[str, type[Fault]] = {"absence": Absence, "hang": Hang, "link outage": LinkOutage}
_FAULT_NAMES = {kind: name for name, kind in _FAULTS.items()}

# What is not a quantity, and may be below zero: coefficients.
_SIGNED = (LossLaw, SizeCurve)


def write_resolved_scenario(scenario: Scenario, path: Path) -> None:
    """Write a scenario to a file that `read_resolved_scenario` reads."""
    write_text_atomically(path, resolved_json(scenario))


def resolved_json(scenario: Scenario) -> str:
    """Return what `write_resolved_scenario` writes: the same text for the same scenario."""
    data = plain(scenario)
    data["faults"] = [{"fault": _FAULT_NAMES[type(fault)], **plain(fault)} for fault in scenario.faults]
    return json.dumps(data, allow_nan=False) + "\n"


def read_resolved_scenario(path: Path) -> Scenario:
    """Return the scenario in a file that ropebridge wrote.

    Raises:
        InputError: The file does not exist, or is not a resolved scenario.
    """
    try:
        scenario: Scenario = _build(Scenario, read_json(path))
        check_countable(scenario)
    except FileNotFoundError:
        raise InputError("there is no such file", where=str(path), valid="name the folder of a run") from None
    except InputError as error:
        raise error.within(str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"this is not a resolved scenario: {error}",
            where=str(path),
            valid="give one that ropebridge wrote",
        ) from None
    return scenario


def _build(kind: Any, value: Any) -> Any:
    """Return the value of type ``kind`` from the result of `planner.files.documents.plain`."""
    if kind is float and value is None:
        return math.inf
    if kind is Path:
        return Path(value)
    if kind == Fault:
        return _build(_FAULTS[value["fault"]], {key: each for key, each in value.items() if key != "fault"})
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _field_types(kind)
        if kind not in _SIGNED:
            for key, each in value.items():
                if isinstance(each, int | float) and not each >= 0:
                    raise ValueError(f"{key} is {each}; it must be 0 or more")
        return kind(**{key: _build(hints[key], each) for key, each in value.items()})
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(_build(arguments[0], each) for each in value)
    if get_origin(kind) is Mapping:
        return {arguments[0](key): _build(arguments[1], each) for key, each in value.items()}
    if get_origin(kind) is UnionType and value is not None and type(value) not in arguments:
        return _build(_member(arguments, value), value)
    _check_plain(kind, value)
    return value


def _check_plain(kind: Any, value: Any) -> None:
    """Raise ValueError for text or a number of another type than that of its field, and for NaN."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return
    if kind in (str, int, float, bool) and type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} is not a value of type {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{value} is not finite")


def _member(kinds: tuple[Any, ...], value: Any) -> Any:
    """Return the dataclass of a union that has the keys of ``value`` as its fields; otherwise the first type."""
    if not isinstance(value, Mapping):
        return kinds[0]
    classes = (kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind))
    return next((kind for kind in classes if set(value) <= set(_field_types(kind))), kinds[0])


@cache
def _field_types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
