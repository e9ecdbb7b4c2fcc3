"""The columns of a sweep's table: what stands in which, and of which type."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from experiments.sweep.definition import PLAN, Sweep
from experiments.sweep.parameters import Parameter
from experiments.sweep.path_types import quantity_at
from experiments.sweep.paths import parse_path
from experiments.sweep.settings import SETTINGS
from planner.files.quantities import Seconds
from planner.files.scenario_entries import ScenarioEntry

_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class ParameterColumns:
    """How a parameter stands in the table.

    Attributes:
        name: Of the parameter, and of the column that has its values as they are written.
        numbers: Of the column that has them in SI units; empty where the values are no quantities.
        unit: Type of the quantities.
    """

    name: str
    numbers: str = ""
    unit: Any = None

    def number(self, value: Any) -> float | None:
        """Return a value in SI units, None where it is no quantity."""
        try:
            return float(TypeAdapter(self.unit).validate_python(value))
        except ValidationError:
            return None


def columns_of(parameter: Parameter) -> ParameterColumns:
    """Return how a parameter stands in the table."""
    quantity = _quantity(parameter.name)
    if quantity is None:
        return ParameterColumns(parameter.name)
    unit, ending = quantity
    return ParameterColumns(parameter.name, parameter.name + ending, unit)


def typed(values: Sequence[Any]) -> list[Any]:
    """Return values of a column as one type: whole numbers, numbers, truth or text; mixed ones as JSON text.

    So are whole numbers of more than 64 bits. None stays None.
    """
    kinds = {type(value) for value in values if value is not None}
    fit = all(value in _INT64 for value in values if isinstance(value, int))
    if kinds == {int, float} and fit:
        return [None if value is None else float(value) for value in values]
    if len(kinds) <= 1 and not kinds & {dict, list, tuple} and fit:
        return list(values)
    return [None if value is None else json.dumps(value, sort_keys=True) for value in values]


def described(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the parameters for readers of the table: name, kind, values, and the column to draw with."""
    return [
        {
            "name": parameter.name,
            "kind": parameter.kind,
            "values": list(parameter.values),
            "column": columns_of(parameter).numbers or parameter.name,
        }
        for parameter in sweep.parameters
    ]


def _quantity(name: str) -> tuple[Any, str] | None:
    if name in SETTINGS:
        return (Seconds, "_s") if name == "duration" else None
    keys = parse_path(name, "")
    return None if keys[0] == PLAN else quantity_at(ScenarioEntry, keys)
