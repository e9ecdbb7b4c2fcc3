"""JSON files of profiles that others publish: read whole, held against the shape that the importer describes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from traces.common.errors import InputError
from traces.common.names import unknown_name

Key = TypeVar("Key", str, int)
Value = TypeVar("Value")


def read_file(path: Path, shape: TypeAdapter[Value], described_in: str) -> Value:
    """Return what a JSON file holds.

    Args:
        path: The file.
        shape: What it must look like.
        described_in: The module that says so, for the message.

    Raises:
        InputError: It cannot be read, or looks otherwise.
    """
    try:
        return shape.validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        where = f"{path}: {place}" if place else str(path)
        raise InputError(first["msg"], where=where, valid=f"the module {described_in} describes the file") from None


def pick(choices: Mapping[Key, Value], key: Key, what: str, *, where: str) -> Value:
    """Return the entry of a key; ``what`` says what the keys are.

    Raises:
        InputError: There is none; the message lists the keys.
    """
    if key not in choices:
        raise unknown_name(what, str(key), map(str, choices), where=where)
    return choices[key]
