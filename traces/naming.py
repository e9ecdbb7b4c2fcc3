"""Looking a thing up by the name that a person wrote."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from traces.errors import InputError

Thing = TypeVar("Thing")


def find_by_name(name: str, things: Mapping[str, Thing], kind: str) -> Thing:
    """Return the thing of that name.

    Args:
        name: What the person wrote.
        things: Everything that there is, by name.
        kind: What the things are, in the singular (``"preset"``), for the message.

    Raises:
        InputError: There is none of that name; the message suggests the nearest and lists them all.
    """
    if name in things:
        return things[name]
    nearest = difflib.get_close_matches(name, things, n=1)
    suggestion = f", did you mean '{nearest[0]}'?" if nearest else ""
    raise InputError(f"no {kind} is called '{name}'{suggestion}", valid=f"choose one of {', '.join(things)}")
