"""Importers of published model profiles, one module per file format, and functions to read their JSON files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from traces.common.errors import InputError, unknown_name
from traces.common.text import read_regular

Key = TypeVar("Key", str, int)
Value = TypeVar("Value")

# Largest size or time in a profile: far above what anybody measures, and its sums and products are finite.
MOST = 10**15
Whole = Annotated[int, Field(ge=0, le=MOST)]
Amount = Annotated[float, Field(ge=0, le=MOST)]


def read_bytes(path: Path) -> bytes:
    """Return the content of a file.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        return read_regular(path)
    except InputError as error:
        raise error.within(str(path)) from None
    except OSError as error:
        problem = f"the file cannot be read: {error.strerror}"
        raise InputError(problem, where=str(path), valid="check the path") from None


def read_file(path: Path, shape: TypeAdapter[Value], described_in: str) -> Value:
    """Return the content of a JSON file as the type of the adapter ``shape``.

    ``described_in`` is the name of the module that describes the file, for the message.

    Raises:
        InputError: The file cannot be read or has another shape.
    """
    try:
        return shape.validate_json(read_bytes(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        where = f"{path}: {place}" if place else str(path)
        raise InputError(first["msg"], where=where, valid=f"the module {described_in} describes the file") from None


def pick(choices: Mapping[Key, Value], key: Key, what: str, *, where: str) -> Value:
    """Return the entry of a key.

    Raises:
        InputError: There is no such key; the message lists all keys. ``what`` is the noun for a key in the message.
    """
    if key not in choices:
        raise unknown_name(what, str(key), map(str, choices), where=where)
    return choices[key]
