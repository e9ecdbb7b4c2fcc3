"""Looking a thing up by the name that a person wrote."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from traces.common.errors import InputError

Thing = TypeVar("Thing")


def find_by_name(name: str, things: Mapping[str, Thing], kind: str, *, where: str = "") -> Thing:
    """Return the thing of that name.

    Args:
        name: What the person wrote.
        things: Everything that there is, by name.
        kind: What the things are, in the singular (``"preset"``), for the message.
        where: File and place in it, for the message.

    Raises:
        InputError: There is none of that name; the message suggests the nearest and lists them all.
    """
    if name in things:
        return things[name]
    raise unknown_name(kind, name, things, where=where)


def unknown_name(kind: str, name: str, valid: Iterable[str], *, where: str = "") -> InputError:
    """Return the error for a name that is not among the valid ones, with the nearest of them first."""
    names = list(valid)
    nearest = get_close_matches(name, names, n=1)
    suggestion = f"did you mean '{nearest[0]}'? " if nearest else ""
    return InputError(f"unknown {kind} '{name}'", where=where, valid=f"{suggestion}valid: {', '.join(names)}")
