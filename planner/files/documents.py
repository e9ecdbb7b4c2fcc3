"""YAML and JSON files as plain values that know on which line each key stands."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from traces.common.errors import InputError

Location = tuple[int | str, ...]


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: There is no such file, it is empty, or it is not text.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise InputError("this is a binary file", where=str(path), valid="give a UTF-8 text file") from None
    except ValueError as error:
        raise InputError(f"this is no path: {error}", where=repr(str(path)), valid="name a file") from None
    except (FileNotFoundError, NotADirectoryError):
        raise InputError("there is no such file", where=str(path), valid="check the path") from None
    except IsADirectoryError:
        raise InputError("this is a folder", where=str(path), valid="name a file") from None
    except PermissionError:
        raise InputError("the file may not be read", where=str(path), valid="check its permissions") from None
    except OSError as error:
        raise InputError(
            f"the file cannot be read: {error.strerror}", where=str(path), valid="check the path"
        ) from None
    if not text.strip():
        raise InputError("the file is empty", where=str(path), valid="give a file with content")
    if "\0" in text:
        raise InputError("this is a binary file", where=str(path), valid="give a UTF-8 text file")
    return text


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
            problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
            raise InputError(f"not YAML: {problem}", where=where, valid="check indentation and quotes") from None
        except (RecursionError, ValueError) as error:
            problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise InputError(f"the file cannot be read: {problem}", where=str(path), valid="simplify it") from None

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

    def part(self, key: str) -> "Document":
        """Return the document in the file that a key of this one names.

        Raises:
            InputError: There is none.
        """
        return Document(self.path.parent / self.value[key])

    @cached_property
    def _composed(self) -> yaml.Node | None:
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
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.value in seen:
                problem = f"the key '{key.value}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


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
