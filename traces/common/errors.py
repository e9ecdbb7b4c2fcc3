"""Errors that ropebridge raises, and names that are looked up.

    RopebridgeError
    ├── InputError     input is wrong: exit status 2
    └── RunError       a run has started and cannot finish: exit status 1

Any other exception is a defect of ropebridge.
"""

import errno
import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import NoneType
from typing import TypeVar


class RopebridgeError(Exception):
    """Base of every error that ropebridge raises on purpose."""


class InterruptError(BaseException):
    """Base of exceptions that ask the command to end; a `BaseException`, so that no handler of errors catches it."""


class InputError(RopebridgeError):
    """Wrong input. The message says where it is, what is wrong and what would be valid.

    Args:
        problem: What is wrong, with the value that was found.
        where: File and place in it (``plan.json: pipelines[0].stages[1]``), empty if there is none.
        valid: What would be valid, or what to do next.
    """

    # All arguments are positional, because pickle and SimPy copy an exception by calling its class with `args`.
    def __init__(self, problem: str, where: str = "", valid: str = "") -> None:
        self.problem = problem
        self.where = where
        self.valid = valid
        super().__init__(problem, where, valid)

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f"; {self.valid}" if self.valid else ""
        return f"{place}{self.problem}{advice}"

    def within(self, outer: str) -> "InputError":
        """Return the same error placed inside ``outer`` (a file, or a key of one)."""
        where = f"{outer}: {self.where}" if self.where else outer
        return InputError(self.problem, where=where, valid=self.valid)


class RunError(RopebridgeError):
    """A run that has started and cannot finish. The message names the rank, the host and the cause."""


# What a full or read-only disk says; and how libraries that are written in Rust say it, with the same numbers.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_IN_RUST = re.compile(r"\(os error (\d+)\)")
# How Python's tempfile says that none of the folders that it has tried can be written.
_NO_TEMPORARY = "No usable temporary directory"
# Most characters of a path in a message.
_MOST_OF_A_PATH = 200


def path_of(error: OSError) -> str:
    """Return the start of the path that an error of the operating system is about; ``a file`` if it names none."""
    return str(error.filename or "a file")[:_MOST_OF_A_PATH]


def unwritable(error: BaseException) -> str:
    """Return what to say of an error that a full or read-only disk has caused; an empty string for any other one."""
    if isinstance(error, FileNotFoundError) and _NO_TEMPORARY in str(error):
        return "temporary files cannot be written; make room, or set TMPDIR to a folder that can be written"
    found = _IN_RUST.search(str(error))
    number = error.errno if isinstance(error, OSError) else int(found[1]) if found is not None else None
    if number not in _NO_ROOM:
        return ""
    path = path_of(error) if isinstance(error, OSError) else "a file"
    return f"{path} cannot be written: {os.strerror(number)}; make room, or choose another place"


# Most characters of a wrong value in a message.
_MOST_SHOWN = 60


def shown(value: object) -> str:
    """Return a value of a built-in scalar type as short text; of other values, whose text could fail, only the type."""
    if type(value) not in _SCALARS:
        return f"a value of type {type(value).__name__}"
    try:
        text = repr(value)
    except ValueError:
        return "a number with thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_SCALARS = (str, int, float, bool, complex, NoneType)

Thing = TypeVar("Thing")

# Similarity ratio of difflib from which a name counts as a typing error of another name.
_SLIP_RATIO = 0.85

# Largest number of suggestions in a message; the list of all names follows them.
_MOST_NAMES = 3


def find_by_name(name: str, things: Mapping[str, Thing], kind: str, *, where: str = "") -> Thing:
    """Return the entry of a mapping by a name that a person wrote.

    In the message, ``kind`` is the noun for an entry, such as ``"preset"``, and ``where`` the file and place in it.

    Raises:
        InputError: There is no such entry; the message suggests the nearest name and lists all.
    """
    # Python calls may give anything, such as a list, which no mapping can look up.
    if isinstance(name, str) and name in things:
        return things[name]
    raise unknown_name(kind, name, things, where=where)


def unknown_name(kind: str, name: str, valid: Iterable[str], *, where: str = "") -> InputError:
    """Return the error for a name that is not valid; the message suggests similar names and lists all valid names."""
    names = list(valid)
    nearest = " or ".join(f"'{each}'" for each in nearest_names(str(name), names))
    suggestion = f"did you mean {nearest}? " if nearest else ""
    return InputError(f"unknown {kind} '{name}'", where=where, valid=f"{suggestion}valid: {', '.join(names)}")


def nearest_names(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that a person may have meant by ``name``; empty if none is similar. Case does not matter.

    The first rule that finds a name decides:

    1. The name that differs by a typing error.
    2. Names whose words contain the words of ``name`` or are contained in them: for ``A100`` both ``a100-40`` and
       ``a100-80``, for ``NVIDIA A100 40GB`` only ``a100-40``.
    3. The name with the most similar spelling.
    """
    by_words = {each: _words(each) for each in names}
    words = _words(name)
    related = [each for each, own in by_words.items() if own and words and (own <= words or words <= own)]
    folded = {each.casefold(): each for each in by_words}
    slips = get_close_matches(name.casefold(), folded, n=1, cutoff=_SLIP_RATIO)
    near = slips or ([] if related else get_close_matches(name.casefold(), folded, n=1))
    return [folded[each] for each in near] or related[:_MOST_NAMES]


def _words(name: str) -> frozenset[str]:
    """Return the words of a name, without case and without a unit at the end of a number."""
    return frozenset(re.sub(r"(?<=\d)gi?b$", "", word) for word in re.findall(r"[a-z0-9]+", name.casefold()))
