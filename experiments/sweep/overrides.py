"""Other values at some places of a scenario or a plan: paths, their checks, and the altered documents."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from planner.check import check_plan
from planner.files.documents import Document, Location
from planner.files.effects import BASES
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
    """Return the keys along a path; numbers and names in brackets are keys too.

    Raises:
        InputError: It is no path.
    """
    if not _PATH.fullmatch(text):
        raise InputError(f"'{text}' is no path", where=where, valid="write one as cluster.links[0].bandwidth")
    return tuple(first or second for first, second in _KEY.findall(text))


def with_value(tree: Any, keys: Keys, value: Any, done: Keys = ()) -> Any:
    """Return a tree of plain values with another one at a place; unchanged parts are shared.

    Raises:
        InputError: A list along the path has no such element, or the path leads through a value without parts.
    """
    if not keys:
        return value
    if isinstance(tree, str) and tree in BASES and done[-1] == "network":
        # The name of a base alone stands for the entry that only names it.
        tree = {"base": tree}
    first, rest, here = keys[0], keys[1:], (*done, keys[0])
    if isinstance(tree, list):
        index = index_in(tree, first, ".".join(done))
        return [*tree[:index], with_value(tree[index], rest, value, here), *tree[index + 1 :]]
    if tree is not None and not isinstance(tree, Mapping):
        raise InputError(f"{tree!r} has no part '{first}'", where=".".join(done), valid="end the path before it")
    branches = dict(tree or {})
    branches[first] = with_value(branches.get(first), rest, value, here)
    return branches


def index_in(elements: list[Any], key: str, where: str) -> int:
    """Return the place of an element of a list, by its number or by a name of it.

    Raises:
        InputError: There is none, or several have the name.
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
        raise InputError(f"'{key}' is the name of several elements", where=where, valid=f"number one of {numbers}")
    raise unknown_name("element", key, dict.fromkeys(name for each in elements for name in names_of(each)), where=where)


def names_of(element: Any) -> Iterator[str]:
    """Yield what an element of a list can be called by: a name, a device, a link's ends."""
    if not isinstance(element, Mapping):
        return
    yield from (element[key] for key in ("name", "device", "link", "inside") if isinstance(element.get(key), str))
    ends = element.get("between")
    if isinstance(ends, list) and len(ends) == 2:
        yield f"{ends[0]}-{ends[1]}"
        yield f"{ends[1]}-{ends[0]}"
    if "from" in element and "to" in element:
        yield f"{element['from']}->{element['to']}"


# Endings of a column's name that say its unit, for the types whose values are text with one.
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
    """Refuse a path that leads nowhere.

    Args:
        kind: Type of the document.
        tree: Content of the document; of what it leaves out only the type is known.
        keys: Keys along the path.
        where: File and place of the path, for the message.

    Raises:
        InputError: A key is unknown; names the first one, and suggests the nearest.
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
    """Return the type of a quantity and the ending that says its unit, None where no quantity stands."""
    for key in keys:
        kind = type_at(kind, key)
    candidates = list(_alternatives(kind))
    return next(((unit, ending) for unit, ending in UNIT_ENDINGS if unit in candidates), None)


def _container(kind: Any) -> type | None:
    """Dict or tuple where that is what stands there, alone or beside something else."""
    origins = (get_origin(each) for each in _alternatives(kind))
    return next((origin for origin in origins if origin in (dict, tuple)), None)


def _alternatives(kind: Any) -> list[Any]:
    """A type, or the members of a union; both what an annotation wraps and the whole."""
    if get_origin(kind) in (dict, tuple, None):
        return [kind]
    inner = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    return [kind, *(found for each in inner for found in _alternatives(each))]


class AlteredDocument(Document):
    """A document that says something else at some places; its lines are those of the file.

    Args:
        original: The document as the file has it.
        changes: Path to value. A path behind a key that names another file alters what is in that file.
        read: Reads a document that this one names.

    Raises:
        InputError: A path leads nowhere.
    """

    def __init__(self, original: Document, changes: Mapping[Keys, Any], read: Callable[[Path], Document]) -> None:
        self.path = original.path
        self.value = original.value
        self._original = original
        self._read = read
        self._of_parts: dict[str, dict[Keys, Any]] = {}
        # What replaces a whole comes before what replaces a part of it.
        for keys, value in sorted(changes.items(), key=lambda change: len(change[0])):
            if len(keys) > 1 and isinstance(self.value, Mapping) and isinstance(self.value.get(keys[0]), str):
                self._of_parts.setdefault(keys[0], {})[keys[1:]] = value
            else:
                try:
                    self.value = with_value(self.value, keys, value)
                except InputError as error:
                    raise error.within(str(self.path)) from None

    def where(self, location: Location) -> str:
        """Return file, line and key path of a place in the original."""
        return self._original.where(location)

    def part(self, key: str) -> Document:
        """Return the document in the file that a key names, altered likewise.

        Raises:
            InputError: There is none, or a path leads nowhere in it.
        """
        document = self._read(self.path.parent / self.value[key])
        changes = self._of_parts.get(key)
        return AlteredDocument(document, changes, self._read) if changes else document


def altered_plan(plan: Plan, changes: Mapping[Keys, Any], scenario: Scenario) -> Plan:
    """Return the checked plan that says something else at some paths into its file.

    Raises:
        InputError: A path leads nowhere, or the plan does not fit the scenario any more.
    """
    tree = json.loads(plan_json(plan))
    try:
        # What replaces a whole comes before what replaces a part of it.
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
