"""The folder of a sweep: its description, a log of every worker, and the table."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.runs.folder import no_folder
from experiments.sweep.definition import Sweep
from experiments.sweep.points import ground_of
from experiments.sweep.table import described
from planner.files.documents import read_json
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError
from traces.common.locks import lock_file

SWEEP = "sweep.json"
TABLE = "points.parquet"
LOGS = "log"
_LOCK = "lock"

# Version of the folder's format.
_VERSION = 1


def check_folder(folder: Path, sweep: Sweep) -> None:
    """Check that a folder is empty, missing, or holds this sweep.

    Raises:
        InputError: The folder holds another sweep or other files.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError("this is a file, not a folder", where=str(folder), valid="name a new folder")
    if not (folder / SWEEP).is_file():
        if any(path.name != LOGS for path in folder.iterdir()):
            raise InputError("this folder holds other files", where=str(folder), valid="name a new folder")
        return
    before = read_sweep_json(folder)
    now = _owner(sweep)
    if before["version"] != _VERSION:
        problem = f"the sweep there has format {before['version']!r}"
        raise InputError(problem, where=str(folder), valid=f"name a new folder: this ropebridge has {_VERSION}")
    for what, advice in _DIFFERENCES.items():
        if before.get(what) != now[what]:
            raise InputError(f"another sweep is there: {advice}", where=str(folder), valid="name a new folder")


# Maps a key of the description to the message if the key's value differs; the digest is last: it always differs, too.
_DIFFERENCES = {
    "ropebridge": "another version of ropebridge made it",
    "names": "it has other parameters",
    "settings": "it has other settings",
    "ground": "its scenario, its plan or a file that they name has changed since",
}


@contextmanager
def claimed(folder: Path, sweep: Sweep) -> Iterator[Path]:
    """Lock the folder for this process while the block runs; create the folder and its `LOGS` if they are missing.

    Raises:
        InputError: The folder holds anything but this sweep, another process has locked it, or it cannot be made.
    """
    check_folder(folder, sweep)
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / LOGS / _LOCK)
    except BlockingIOError:
        raise InputError("this sweep is under way already", where=str(folder), valid="wait for its end") from None
    except OSError as error:
        raise no_folder(folder, error) from None
    with lock:
        # Checked again, since another process may have begun a sweep here before the lock was taken.
        check_folder(folder, sweep)
        yield folder


def write_sweep_json(folder: Path, sweep: Sweep, points: int, metrics: Sequence[str], kind: str) -> None:
    """Write ``sweep.json``, which describes the table: its kind, parameters, number of points, columns of metrics."""
    document = {
        "version": _VERSION,
        "kind": kind,
        **_owner(sweep),
        "draws": sweep.draws,
        "seed": sweep.seed,
        "points": points,
        "table": TABLE,
        "parameters": described(sweep),
        "metrics": list(metrics),
    }
    write_text_atomically(folder / SWEEP, json.dumps(document, indent=1) + "\n")


def read_sweep_json(folder: Path) -> dict[str, Any]:
    """Return the description of the sweep in a folder.

    Raises:
        InputError: The folder holds no sweep, or a damaged one.
    """
    try:
        document = read_json(folder / SWEEP)
        if not isinstance(document, dict) or "version" not in document:
            raise ValueError("it is no sweep")
    except (OSError, ValueError) as error:
        raise InputError(
            f"the sweep is damaged: {error}", where=str(folder / SWEEP), valid="name a new folder"
        ) from None
    return document


def _owner(sweep: Sweep) -> dict[str, Any]:
    """Return the part of the description in which two sweeps that share a folder must not differ."""
    return {
        "ropebridge": version("ropebridge"),
        "settings": sweep.common,
        "names": sorted(parameter.name for parameter in sweep.parameters),
        "ground": ground_of(sweep),
    }
