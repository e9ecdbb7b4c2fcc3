"""What ranks on other machines leave, brought to the head over the job's store, a piece at a time."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from executor.core.job import JobFolder

_PIECE_BYTES = 4 << 20
# Pieces that lie in the store at a time.
_AHEAD = 4
_PAUSE_S = 0.005


def upload_results(store: TCPStore, job: JobFolder, rank: int) -> None:
    """Send all files that a rank has left in its own folder of the job."""
    paths = [path for path in job.left(rank) if path.exists()]
    store.set(_list_key(rank), json.dumps([path.name for path in paths]))
    for path in paths:
        with path.open("rb") as file:
            number, piece = 1, b"all but the end"
            while piece:
                piece = file.read(_PIECE_BYTES)
                while number > _AHEAD and store.check([_piece_key(path, number - _AHEAD)]):
                    time.sleep(_PAUSE_S)
                # What holds any bytes is typed as text.
                store.set(_piece_key(path, number), piece)  # type: ignore[arg-type]
                number += 1


def collect(store: TCPStore, job: JobFolder, rank: int, is_there: Callable[[], bool]) -> bool:
    """Write the files that a rank hands over into the head's folder of the job; return whether all came.

    Args:
        store: Of the job.
        job: Its folder on the head.
        rank: Whose.
        is_there: Whether the rank's machine still is.
    """
    if not _await(store, _list_key(rank), is_there):
        return False
    for name in json.loads(store.get(_list_key(rank))):
        # Whatever it is called there, here it lies in the job's folder.
        path = job.path / Path(name).name
        beside, number = path.with_suffix(".part"), 1
        with beside.open("wb") as file:
            while _await(store, key := _piece_key(path, number), is_there):
                piece = store.get(key)
                store.delete_key(key)
                if not piece:
                    break
                file.write(piece)
                number += 1
            else:
                return False
        beside.rename(path)
    return True


def _await(store: TCPStore, key: str, is_there: Callable[[], bool]) -> bool:
    """Wait for a key, for as long as who sets it is there."""
    while not store.check([key]):
        if not is_there():
            # It may have been set just before.
            return bool(store.check([key]))
        time.sleep(_PAUSE_S)
    return True


def _list_key(rank: int) -> str:
    return f"left/{rank}"


def _piece_key(path: Path, number: int) -> str:
    return f"left/{path.name}/{number}"
