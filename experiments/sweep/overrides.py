"""Replaces values in scenarios and plans at paths such as ``cluster.links[0].bandwidth``, and checks the paths."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from planner.check import check_plan
from planner.files.documents import Document, Location
from planner.files.effects import BASES, NO_EFFECTS
from planner.files.parsing import (
    BitsPerSecond,
    Bytes,
    BytesOrUnlimited,
    BytesPerSecond,
    Flop,
    FlopPerSecond,
    Seconds,
    keys_at,
    parse,
    type_at,
)
from planner.files.plan import plan_json
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError, unknown_name

Keys = tuple[str, ...]

_PATH = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[[^\[\]]+\])*")
_KEY = re.compile(r"\[([^\[\]]+)\]|([^.\[\]]+)")


def parse_path(text: str, where: str) -> Keys:
    """Parse a path into its keys: ``cluster.links[0].latency`` into ``("cluster", "links", "0", "latency")``.

    Raises:
        InputError: The text is no path.
    """
    if not _PATH.fullmatch(text):
        raise InputError(f"'{text}' is no path", where=where, valid="write a path such as cluster.links[0].bandwidth")
    return tuple(first or second for first, second in _KEY.findall(text))


def with_value(tree: Any, keys: Keys, value: Any, done: Keys = (), *, none_removes: bool = False) -> Any:
    """Return a copy of a tree of plain values with the value at a path replaced; unchanged parts are shared.

    ``done`` holds the keys that led to ``tree``, for messages. With ``none_removes`` the value None removes the key.

    Raises:
        InputError: A list along the path has no such element, or the path leads through a value without parts.
    """
    if not keys:
        return value
    if isinstance(tree, str) and tree in BASES and done[-1] == "network":
        # ``network: NAME`` is short for ``network: {base: NAME}``.
        tree = {"base": tree}
    first, rest, here = keys[0], keys[1:], (*done, keys[0])
    if isinstance(tree, list):
        index = index_in(tree, first, ".".join(done))
        element = with_value(tree[index], rest, value, here, none_removes=none_removes)
        return [*tree[:index], element, *tree[index + 1 :]]
    if tree is not None and not isinstance(tree, Mapping):
        raise InputError(f"{tree!r} has no part '{first}'", where=".".join(done), valid="end the path here")
    branches = dict(tree or {})
    branches[first] = with_value(branches.get(first), rest, value, here, none_removes=none_removes)
    if none_removes and value is None and not rest:
        del branches[first]
    return branches


def index_in(elements: list[Any], key: str, where: str) -> int:
    """Return the index of the list element with a number, counted from 0, or with a name of `names_of`.

    Raises:
        InputError: No element, or more than one, has the number or the name.
    """
    if key.isdecimal():
        if int(key) < len(elements):
            return int(key)
        problem = f"there is no element {key}"
        raise InputError(problem, where=where, valid=f"there are {len(elements)}, counted from 0")
    found = [index for index, element in enumerate(elements) if key in set(names_of(element))]
    if len(found) == 1:
        return found[0]
    if found:
        numbers = ", ".join(map(str, found))
        problem = f"'{key}' is the name of several elements"
        raise InputError(problem, where=where, valid=f"give the number of one of them: {numbers}")
    raise unknown_name("element", key, dict.fromkeys(name for each in elements for name in names_of(each)), where=where)


def names_of(element: Any) -> Iterator[str]:
    """Yield the names by which a path can refer to a list element: its name, its device, or the ends of a link."""
    if not isinstance(element, Mapping):
        return
    yield from (element[key] for key in ("name", "device", "link", "inside") if isinstance(element.get(key), str))
    ends = element.get("between")
    if isinstance(ends, list) and len(ends) == 2:
        yield f"{ends[0]}-{ends[1]}"
        yield f"{ends[1]}-{ends[0]}"
    if "from" in element and "to" in element:
        yield f"{element['from']}->{element['to']}"


# Types whose values are text with a unit, each with the suffix of the column that has its values in the SI unit.
UNIT_ENDINGS: tuple[tuple[Any, str], ...] = (
    (Seconds, "_s"),
    (BitsPerSecond, "_bps"),
    (Bytes, "_bytes"),
    (BytesOrUnlimited, "_bytes"),
    (BytesPerSecond, "_bytes_per_s"),
    (Flop, "_flop"),
    (FlopPerSecond, "_flops"),
)


def check_path(kind: Any, tree: Any, keys: Keys, where: str) -> None:
    """Check that a path leads to a value of a document.

    Args:
        kind: Type of the document.
        tree: Content of the document; parts that are absent are only checked by their type.
        keys: Keys along the path.
        where: File and place at which the path is written, for the message.

    Raises:
        InputError: A key is unknown; the message names the first one, and suggests the nearest.
    """
    for depth, key in enumerate(keys):
        names, container = keys_at(kind, ()), _container(kind)
        if isinstance(tree, list):
            try:
                tree = tree[index_in(tree, key, ".".join(keys[:depth]))]
            except InputError as error:
                raise error.within(where) from None
            kind = type_at(kind, 0)
        elif names:
            if key not in names:
                raise unknown_name("key", key, names, where=where)
            kind = type_at(kind, key)
            tree = tree.get(key) if isinstance(tree, Mapping) else None
        elif container is dict and isinstance(tree, Mapping):
            if key not in tree:
                raise unknown_name("key", key, map(str, tree), where=where)
            kind, tree = type_at(kind, key), tree[key]
        else:
            place = ".".join(keys[:depth])
            absent = container is not None
            problem = f"there is no '{place}' to change a part of" if absent else f"'{place}' has no parts"
            valid = f"write '{place}' into the file first" if absent else "end the path there"
            raise InputError(problem, where=where, valid=valid)


def quantity_at(kind: Any, keys: Keys) -> tuple[Any, str] | None:
    """Return the type of the quantity at a path and the suffix from `UNIT_ENDINGS`; None if there is no quantity."""
    for key in keys:
        kind = type_at(kind, key)
    candidates = list(_alternatives(kind))
    return next(((unit, ending) for unit, ending in UNIT_ENDINGS if unit in candidates), None)


def _container(kind: Any) -> type | None:
    """Return ``dict`` or ``tuple`` if a type is such a container or a union with one, else None."""
    origins = (get_origin(each) for each in _alternatives(kind))
    return next((origin for origin in origins if origin in (dict, tuple)), None)


def _alternatives(kind: Any) -> list[Any]:
    """Return a type and all types that it may stand for: members of unions, and the type in ``Annotated``."""
    if get_origin(kind) in (dict, tuple, None):
        return [kind]
    inner = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    return [kind, *(found for each in inner for found in _alternatives(each))]


class AlteredDocument(Document):
    """A document with some values replaced; its error messages give line numbers of the original file.

    Args:
        original: The document in the file.
        changes: Maps a path to its new value; None removes the key. If the value along a path is the name of a file,
            the rest of the path leads into that file.
        read: Reads a document by its path.

    Raises:
        InputError: A path leads to no value.
    """

    def __init__(self, original: Document, changes: Mapping[Keys, Any], read: Callable[[Path], Document]) -> None:
        self.path = original.path
        self.value = original.value
        self._original = original
        self._read = read
        self._of_parts: dict[str, dict[Keys, Any]] = {}
        if isinstance(self.value, Mapping) and self.value.get("effects") == NO_EFFECTS:
            # ``effects: none`` is short for ``effects: {network: ideal}``.
            self.value = {**self.value, "effects": {"network": "ideal"}}
        # Shorter paths first: a whole is replaced before a part of it.
        for keys, value in sorted(changes.items(), key=lambda change: len(change[0])):
            if len(keys) > 1 and isinstance(self.value, Mapping) and isinstance(self.value.get(keys[0]), str):
                self._of_parts.setdefault(keys[0], {})[keys[1:]] = value
            else:
                try:
                    self.value = with_value(self.value, keys, value, none_removes=True)
                except InputError as error:
                    raise error.within(str(self.path)) from None

    def where(self, location: Location) -> str:
        """Return file, line and key path of a location in the original."""
        return self._original.where(location)

    def part(self, *location: int | str) -> Document:
        """Return the document in the file that a location names, with the changes in it.

        Raises:
            InputError: There is no such file, or a path leads to no value in it.
        """
        value = self.value
        for each in location:
            value = value[each]
        document = self._read(self.path.parent / value)
        changes = self._of_parts.get(str(location[0])) if len(location) == 1 else None
        return AlteredDocument(document, changes, self._read) if changes else document


def altered_plan(plan: Plan, changes: Mapping[Keys, Any], scenario: Scenario) -> Plan:
    """Return a plan with values replaced at paths of its JSON form, and check the result.

    Raises:
        InputError: A path leads to no value, or the altered plan does not fit the scenario.
    """
    tree = json.loads(plan_json(plan))
    try:
        # Shorter paths first: a whole is replaced before a part of it.
        for keys in sorted(changes, key=len):
            tree = with_value(tree, keys, changes[keys])
        altered = parse(Plan, _PlanInMemory(tree), tree)
        check_plan(altered, scenario)
    except InputError as error:
        raise error.within("plan") from None
    return altered


class _PlanInMemory(Document):
    def __init__(self, value: Any) -> None:
        self.path = Path()
        self.value = value

    def where(self, location: Location) -> str:
        return ".".join(map(str, location))
