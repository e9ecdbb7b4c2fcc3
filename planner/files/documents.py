"""YAML and JSON files as plain values, with the line of each key for messages."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser  # type: ignore[attr-defined]
from yaml.resolver import Resolver

from planner.plan.actions import Action
from traces.common.errors import InputError
from traces.common.text import read_regular

Location = tuple[int | str, ...]


# Bounds on what a file may hold, far above what anybody writes: what is beyond them is a mistake or an attack. YAML is
# read at about half a megabyte per second. Aliases count as often as they are used.
_MOST_JSON_BYTES, _MOST_YAML_BYTES = 64 * 2**20, 4 * 2**20
_MOST_VALUES = 300_000
_TOO_MANY = f"there are more than {_MOST_VALUES:,} values, aliases counted as what they stand for"
_MOST_LEVELS = 60
_MOST_DIGITS = 400
# Integers of so few digits can be converted to floats, and so can the product of three of them.
_MOST_INTEGER_DIGITS = 100

_DIGITS = {"tag:yaml.org,2002:int": _MOST_INTEGER_DIGITS, "tag:yaml.org,2002:float": _MOST_DIGITS}
_YAML_TAGS = _DIGITS.keys() | {f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "null", "seq", "map", "merge")}


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: The file does not exist, cannot be read, is empty or too large, or is not text.
    """

    def refused(problem: str, valid: str = "check the path") -> InputError:
        return InputError(problem, where=str(path), valid=valid)

    try:
        text = read_regular(path, _MOST_JSON_BYTES if path.suffix == ".json" else _MOST_YAML_BYTES).decode()
    except InputError as error:
        raise error.within(str(path)) from None
    except UnicodeDecodeError:
        raise refused("this is a binary file", "give a UTF-8 text file") from None
    except ValueError as error:
        raise InputError(f"this is not a path: {error}", where=repr(str(path)), valid="name a file") from None
    except (FileNotFoundError, NotADirectoryError):
        raise refused("there is no such file") from None
    except IsADirectoryError:
        raise refused("this is a folder", "name a file") from None
    except PermissionError:
        raise refused("the file may not be read", "check its permissions") from None
    except OSError as error:
        raise refused(f"the file cannot be read: {error.strerror}") from None
    if not text.strip():
        raise refused("the file is empty", "give a file with content")
    if "\0" in text:
        raise refused("this is a binary file", "give a UTF-8 text file")
    return text


def read_json(path: Path) -> Any:
    """Return the plain value of a JSON file that ropebridge wrote.

    Raises:
        InputError: The file is special, or has more than `traces.common.text.MOST_BYTES`.
        OSError: The file cannot be read.
        ValueError: The file is not JSON.
    """
    return _written_value(_written_text(path))


def read_json_lines(path: Path) -> list[Any]:
    """Return the plain values of a file that ropebridge wrote, one in each line; raises as `read_json` does."""
    return [_written_value(line) for line in _written_text(path).splitlines()]


def _written_value(text: str) -> Any:
    try:
        return _json(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _written_text(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except InputError as error:
        raise error.within(str(path)) from None


class Document:
    """A YAML or JSON file as plain values, with the line of each key for messages.

    Args:
        path: Path of the file; JSON if it ends in ``.json``, YAML otherwise.

    Raises:
        InputError: The file cannot be read or is not valid YAML or JSON.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = text = read_text(path)
        try:
            self.value: Any = _json(text) if path.suffix == ".json" else parse_yaml(text)
        except json.JSONDecodeError as error:
            raise InputError(
                f"the file is not JSON: {error.msg}",
                where=f"{path}:{error.lineno}",
                valid="give a file written by ropebridge",
            ) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
            problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
            raise InputError(
                f"the file is not YAML: {problem}", where=where, valid="check indentation and quotes"
            ) from None
        except (RecursionError, ValueError) as error:
            problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise InputError(f"the file cannot be read: {problem}", str(path), "use plain values") from None

    def where(self, location: Location) -> str:
        """Return file, line and key path of a place in the document."""
        node, line = self._composed, None
        for key in location:
            child = _child(node, key)
            if child is None:
                break
            node, line = child
        place = _key_path(location)
        file = f"{self.path}:{line}" if line is not None else str(self.path)
        return f"{file}: {place}" if place else file

    def part(self, *location: int | str) -> "Document":
        """Return the document in the file whose path is the value at a location, relative to this file."""
        value = self.value
        for key in location:
            value = value[key]
        return Document(self.path.parent / value)

    @cached_property
    def _composed(self) -> yaml.Node | None:
        """YAML nodes with line numbers; composed only for error messages, because composing is slow."""
        try:
            return _Loader(self._text).get_single_node()
        except yaml.YAMLError:
            # The file is JSON that is not YAML, for example indented by tabs. Messages give key paths without lines.
            return None


def parse_yaml(text: str) -> Any:
    """Return the plain value of a YAML text, whose aliases are not multiplied without bound.

    Raises:
        yaml.YAMLError: The text is not YAML, gives a key twice, contains itself, or has too many values.
        RecursionError: The text is nested too deeply.
        ValueError: A number cannot be read.
    """
    loader = _Loader(text)
    root = loader.get_single_node()
    if root is None:
        return None
    _extent(root, {}, 0)
    return loader.construct_document(root)


@dataclass(frozen=True, slots=True)
class _Extent:
    """The number of values in a YAML node and its levels, each alias counted as what it stands for."""

    values: int
    levels: int


def _extent(node: yaml.Node, known: dict[int, _Extent | None], level: int) -> _Extent:
    """Return the extent of a node at a level; ``known`` has those of nodes before, None while it is being found."""
    found = known.get(id(node), _Extent(0, 0))
    if found is None:
        raise _refused("a value contains itself", node)
    if not found.values:
        _check_scalar(node)
        known[id(node)] = None
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        pairs = (each if isinstance(each, tuple) else (each,) for each in children)
        parts = [_extent(child, known, level + 1) for pair in pairs for child in pair] if level < _MOST_LEVELS else []
        found = _Extent(1 + sum(part.values for part in parts), 1 + max((part.levels for part in parts), default=0))
        known[id(node)] = found
    if level + found.levels > _MOST_LEVELS:
        raise RecursionError
    if found.values > _MOST_VALUES:
        raise _refused(_TOO_MANY, node)
    return found


def _check_scalar(node: yaml.Node) -> None:
    if node.tag not in _YAML_TAGS:
        raise _refused(f"the tag '{node.tag}' is not used here", node)
    if isinstance(node, yaml.ScalarNode) and len(node.value) > _DIGITS.get(node.tag, math.inf):
        raise _refused(f"a number has {len(node.value)} digits", node)


def _refused(problem: str, place: Any) -> yaml.YAMLError:
    """Return the error for a problem at a node or an event."""
    return yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


def _json(text: str) -> Any:
    """Return the plain value of a JSON text, checked as `parse_yaml` does."""
    value = json.loads(text, object_pairs_hook=_unrepeated, parse_int=_integer)
    _check_levels(value, 0)
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MOST_INTEGER_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key '{twice}' is given twice")
    return found


def _check_levels(value: Any, level: int) -> None:
    if level > _MOST_LEVELS:
        raise RecursionError
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        if isinstance(child, dict | list):
            _check_levels(child, level + 1)


class _Loader(Composer, CParser, SafeConstructor, Resolver):
    """YAML loader that refuses repeated keys and reads dates as text.

    The parser is that of libyaml. Nodes are put together in Python, which notices texts that are nested too deeply.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class's own attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in Resolver.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > _MOST_VALUES:
            raise _refused(_TOO_MANY, self.peek_event())
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.value in seen:
                problem = f"the key '{key.value}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_bool(self, node: yaml.ScalarNode) -> bool:
        try:
            return super().construct_yaml_bool(node)
        except KeyError:
            raise _refused(f"'{node.value}' is neither true nor false", node) from None


# The base class's table names its own method. mypy is told of PyYAML's own loaders only.
_Loader.add_constructor("tag:yaml.org,2002:bool", _Loader.construct_yaml_bool)  # type: ignore[type-var]


def plain(value: Any, *, defaults: bool = True) -> Any:
    """Return a value as dicts, lists and scalars for JSON; infinity becomes None.

    Args:
        value: Dataclasses, mappings, sequences and arrays, nested in any way; actions and paths become text.
        defaults: Whether to include fields of dataclasses that have their default.
    """
    if isinstance(value, Action | Path):
        return str(value)
    if is_dataclass(value):
        given = {field: getattr(value, field.name) for field in fields(value)}
        return {f.name: plain(v, defaults=defaults) for f, v in given.items() if defaults or v != _default(f)}
    if isinstance(value, Mapping):
        return {key: plain(each, defaults=defaults) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, defaults=defaults) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return None if value == math.inf else value


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _key_path(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _child(node: yaml.Node | None, key: int | str) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key], node.value[key].start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == str(key):
                return value, name.start_mark.line + 1
    return None
