"""What stands at a place of a scenario or a plan: whether there is such a place, and in which unit its values are."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

from experiments.sweep.paths import Keys, index_in
from planner.files.parsing import keys_at, type_at
from planner.files.quantities import (
    BitsPerSecond,
    Bytes,
    BytesOrUnlimited,
    BytesPerSecond,
    Flop,
    FlopPerSecond,
    Seconds,
)
from traces.common.errors import InputError
from traces.common.names import unknown_name

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
        kind: The type of what is written in the file.
        tree: What is written there; places that are left out have their type alone.
        keys: The path.
        where: The path's own place, for the message.

    Raises:
        InputError: With the first key that is not there, and the nearest one that is.
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
