"""The message for a name that is not among the valid ones."""

from collections.abc import Iterable
from difflib import get_close_matches

from traces.errors import InputError


def unknown_name(what: str, name: str, valid: Iterable[str], *, where: str = "") -> InputError:
    """Return the error for an unknown name, with the closest valid one first."""
    names = list(valid)
    close = get_close_matches(name, names, n=1)
    guess = f"did you mean '{close[0]}'? " if close else ""
    return InputError(f"unknown {what} '{name}'", where=where, valid=f"{guess}valid: {', '.join(names)}")
