"""What the files of eth-easl/sailor have in common: JSON with string keys, and names of GPU kinds."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from traces.errors import InputError
from traces.naming import unknown_name

# Their name to ours. What they call RTX-2080 is probably an RTX 2080 Ti (see planner/roofline.py).
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "A100-40": "a100-40",
        "A100-80": "a100-80",
        "GH-96": "gh200-96",
        "RTX-2080": "rtx-2080",
        "RTX-3090": "rtx-3090",
        "Titan-RTX": "titan-rtx",
        "V100-16": "v100-16",
    }
)

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
