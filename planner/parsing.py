"""Files that people write, turned into plain data; errors name file, line, key, value and what would be valid."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from traces.errors import InputError
from traces.naming import unknown_name

Data = TypeVar("Data")
Location = tuple[int | str, ...]

# Every dataclass that is read from a file refuses unknown keys and silent conversions.
STRICT = ConfigDict(extra="forbid", strict=True)


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: There is no such file, it is empty, or it is not text.
    """
    try:
        text = path.read_bytes().decode()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("there is no such file", where=str(path), valid="check the path") from None
    except IsADirectoryError:
        raise InputError("this is a folder", where=str(path), valid="name a file") from None
    except PermissionError:
        raise InputError("the file may not be read", where=str(path), valid="check its permissions") from None
    except UnicodeDecodeError:
        raise InputError("this is a binary file", where=str(path), valid="give a UTF-8 text file") from None
    if not text.strip():
        raise InputError("the file is empty", where=str(path), valid="give a file with content")
    if "\0" in text:
        raise InputError("this is a binary file", where=str(path), valid="give a UTF-8 text file")
    return text


_UNKNOWN_KEY = ("unexpected_keyword_argument", "extra_forbidden")


class Document:
    """A YAML or JSON file as plain values, which knows on which line each key stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = text = read_text(path)
        try:
            self.value: Any = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_Loader)
        except json.JSONDecodeError as error:
            raise InputError(
                f"not JSON: {error.msg}",
                where=f"{path}:{error.lineno}",
                valid="give a file written by ropebridge",
            ) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
            problem = getattr(error, "problem", None) or str(error)
            raise InputError(f"not YAML: {problem}", where=where, valid="check indentation and quotes") from None

    def where(self, location: Location) -> str:
        """Return file, line and key path of a place in the document."""
        node, line = self._compose(), None
        for key in location:
            child = _child(node, key)
            if child is None:
                break
            node, line = child
        place = _key_path(location)
        file = f"{self.path}:{line}" if line is not None else str(self.path)
        return f"{file}: {place}" if place else file

    def _compose(self) -> yaml.Node | None:
        """The document with its lines; only for a message, since it takes long."""
        try:
            return yaml.compose(self._text, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            # JSON that is no YAML, indented with tabs for one: the key path must do without a line.
            return None


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: a key stands once, and a date is text like any other."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class's own attribute
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"the key '{key.value}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse(kind: type[Data], document: Document, value: Any, location: Location = ()) -> Data:
    """Return ``value``, which stands at ``location`` of the document, as a ``kind``.

    Raises:
        InputError: The first thing in it that is wrong.
    """
    try:
        # By way of JSON, where strictness allows a list for a tuple and a string for a path, and nothing else.
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        raise _first_error(error, kind, document, value, location) from None


def reported(convert: Any) -> Any:
    """Return a validator that calls ``convert`` and hands its `InputError` on with the place where it happened."""

    def validate(value: object) -> Any:
        try:
            return convert(value)
        except InputError as error:
            # Braces in the text would be taken for placeholders.
            raise PydanticCustomError("input", "{problem}", {"problem": error.problem, "valid": error.valid}) from None

    return validate


def _first_error(error: ValidationError, kind: type, document: Document, value: Any, location: Location) -> InputError:
    # A misspelt key is also a missing one; what was written says more than what was not.
    details = min(error.errors(include_url=False), key=lambda each: each["type"] not in _UNKNOWN_KEY)
    inner = _inside(value, details["loc"])
    where = document.where((*location, *inner))
    if details["type"] in _UNKNOWN_KEY:
        name = str(inner[-1])
        return unknown_name("key", name, _keys_at(kind, inner[:-1]), where=where)
    if details["type"] == "input":
        context = details["ctx"]
        return InputError(context["problem"], where=where, valid=context["valid"])
    if details["type"] in ("missing", "missing_argument"):
        return InputError(f"the key '{inner[-1]}' is missing", where=where, valid=f"add '{inner[-1]}:' there")
    text = repr(details["input"])
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return InputError(f"{shown} is not valid", where=where, valid=details["msg"][0].lower() + details["msg"][1:])


def _inside(value: Any, location: Location) -> Location:
    """The part of a location that leads through ``value``; behind it pydantic names the members of a union."""
    for depth, key in enumerate(location):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int):
            value = value[key] if key < len(value) else None
        else:
            return location[:depth]
    return location


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


def _keys_at(kind: Any, location: Location) -> list[str]:
    """Names of the keys that are valid at a place inside a dataclass."""
    for part in location:
        kind = _member(kind, part)
    return [key for dataclass_ in _dataclasses(kind) for key in _field_types(dataclass_)]


def _member(kind: Any, part: int | str) -> Any:
    """The type of what stands at a key or index inside a type."""
    if get_origin(kind) in (dict, tuple):
        return get_args(kind)[-1 if get_origin(kind) is dict else 0]
    if isinstance(kind, type) and is_dataclass(kind):
        return _field_types(kind).get(str(part))
    return next((found for each in get_args(kind) if (found := _member(each, part)) is not None), None)


def _field_types(kind: type) -> Mapping[str, Any]:
    """The fields of a dataclass by the keys that stand for them in a file."""
    hints = get_type_hints(kind, include_extras=True)
    types: dict[str, Any] = {}
    for field in fields(kind):
        hint = hints[field.name]
        infos = [info for info in getattr(hint, "__metadata__", ()) if isinstance(info, FieldInfo)]
        types[next((info.alias for info in infos if info.alias), field.name)] = hint
    return types


def _dataclasses(kind: Any) -> Iterator[type]:
    """The dataclasses that a type such as ``Entry | None`` stands for."""
    if isinstance(kind, type) and is_dataclass(kind):
        yield kind
    elif get_origin(kind) not in (dict, tuple):
        for argument in get_args(kind):
            yield from _dataclasses(argument)
