"""The points of a sweep: all combinations of its values, each with a key that identifies it."""

import hashlib
import os.path
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from experiments.sweep.definition import PLAN, USER_CODE, Sweep, scenario_path, user_file
from experiments.sweep.parameters import RANDOM, canonical
from planner.files.documents import Document
from traces.common.errors import InputError

_DOCUMENTS = (".yaml", ".yml")

# Suffix of files that do not affect a simulation, which never runs the model's code.
_CODE = ".py"


def named_files(value: Any, folder: Path) -> list[Path]:
    """Return all files that a value names in its texts, directly or through other files, each once.

    Names are relative to the folder, or to the file that contains them; text that names no file is ignored.
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
    """Return a sorted list of pairs, the name and the SHA-256 digest of each file."""
    return sorted([path.name, _digest(path)] for path in paths)


def _digest(path: Path) -> str:
    """Return the digest of a file; empty if it cannot be read, which the points that use the file report."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _files_in(value: Any, folder: Path) -> Iterator[Path]:
    return (folder / text for text in _texts(value) if os.path.isfile(folder / text))


def _content(path: Path) -> Any:
    """Return the content of a document; None if it is damaged, which the points that use the document report."""
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


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep.

    Attributes:
        number: Index of the point in the sweep.
        key: Digest of the values of all parameters and of the files that they name.
        values: Maps each parameter's name to its value.
    """

    number: int
    key: str
    values: dict[str, Any]


def points_of(sweep: Sweep) -> list[Point]:
    """Return all points of a sweep in order."""
    folders = _scenario_folders(sweep)
    files: dict[str, list[list[str]]] = {}
    points = []
    for number, values in enumerate(combinations(sweep)):
        named = []
        for name, value in values.items():
            text = canonical([name, value])
            if text not in files:
                files[text] = digests(_files_of(name, value, sweep, folders))
            named.append(files[text])
        points.append(Point(number, digest_of([values, named]), values))
    return points


def combinations(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield the values of all parameters of each point; the first parameter changes slowest.

    The points are the Cartesian product of all grids, the lists and the draws. The lists advance together as one
    factor of this product, at the position of the first list; the draws are its last factor.
    """
    lists = [parameter for parameter in sweep.parameters if parameter.kind == "list"]
    drawn = [parameter for parameter in sweep.parameters if parameter.kind in RANDOM]
    factors: list[list[dict[str, Any]]] = []
    for parameter in sweep.parameters:
        if parameter.kind == "grid":
            factors.append([{parameter.name: value} for value in parameter.values])
        elif lists and parameter is lists[0]:
            places = range(len(parameter.values))
            factors.append([{each.name: each.values[place] for each in lists} for place in places])
    if drawn:
        factors.append([{each.name: each.drawn(sweep.seed, draw) for each in drawn} for draw in range(sweep.draws)])
    names = [parameter.name for parameter in sweep.parameters]
    for choice in product(*factors):
        values = {name: value for part in choice for name, value in part.items()}
        yield {name: values[name] for name in names}


def ground_of(sweep: Sweep) -> str:
    """Return a digest of a sweep's settings, names of parameters and files, equal for sweeps that share a folder."""
    names = sorted(parameter.name for parameter in sweep.parameters)
    named = [name for name in ("scenario", PLAN, *USER_CODE) if name in sweep.common]
    files = [_files_of(name, sweep.common[name], sweep, ()) for name in named]
    return digest_of([sweep.common, names, [digests(each) for each in files]])


def digest_of(value: Any) -> str:
    """Return a digest of plain values, the same for equal values."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:20]


def _files_of(name: str, value: Any, sweep: Sweep, folders: Sequence[Path]) -> list[Path]:
    """Return the files that the value of a parameter or a setting names, directly or through other files."""
    if name == "scenario":
        path = scenario_path(value, sweep.folder)
        return named_files(path.name, path.parent)
    if name == PLAN:
        return named_files(value, sweep.folder)
    if (code := user_file(name, value, sweep.folder)) is not None:
        return [code] if code.is_file() else []
    return [path for folder in folders for path in named_files(value, folder)]


def _scenario_folders(sweep: Sweep) -> list[Path]:
    """Return the folders of all scenario files and of the files that these name; paths in a file are relative to it."""
    files = [path for name in sweep.values_of("scenario") for path in _files_of("scenario", name, sweep, ())]
    return list(dict.fromkeys(path.parent for path in files))
