"""Places in a scenario or a plan as a person writes them: ``cluster.links[cloud-edge].latency``."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from planner.files.network_entry import BASES
from traces.common.errors import InputError
from traces.common.names import unknown_name

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
    """Return a tree of plain values with another one at a place; what is not on the way there is shared.

    Raises:
        InputError: A list on the way has no such element, or the way leads through something that has no parts.
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
