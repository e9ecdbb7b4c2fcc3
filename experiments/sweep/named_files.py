"""Files that values of a sweep or a scenario name: what they hold decides what comes out of a point."""

import hashlib
import os.path
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.files.documents import Document
from traces.common.errors import InputError

_DOCUMENTS = (".yaml", ".yml")

# A model's code is not run in a simulation.
_CODE = ".py"


def named_files(value: Any, folder: Path) -> list[Path]:
    """Return the files that some text in a value names, and those that these name in turn, each once.

    Args:
        value: Plain data; text in it that is no file's name stands for nothing.
        folder: What the names are relative to.
    """
    found: dict[Path, None] = {}
    queue = list(_files_in(value, folder))
    while queue:
        path = Path(os.path.abspath(queue.pop()))
        if path not in found and path.suffix != _CODE:
            found[path] = None
            if path.suffix in _DOCUMENTS:
                queue += _files_in(_content(path), path.parent)
    return list(found)


def digests(paths: Iterable[Path]) -> list[list[str]]:
    """Return name and digest of each file, in an order of their own."""
    return sorted([path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in paths)


def _files_in(value: Any, folder: Path) -> Iterator[Path]:
    return (folder / text for text in _texts(value) if os.path.isfile(folder / text))


def _content(path: Path) -> Any:
    """Nothing where it is no document: then the points that use it say so."""
    try:
        return Document(path).value
    except InputError:
        return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
