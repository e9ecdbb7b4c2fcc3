"""Locks on files, which end with the process that has them, however it ends."""

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast


def lock_file(path: Path, mode: str = "ab", waiting: Callable[[], object] | None = None) -> BinaryIO:
    """Open a file, unbuffered, and lock it against other processes until it is closed.

    Args:
        path: Path of the file.
        mode: Mode of `open`; with the default, the file is created if it is missing.
        waiting: Called before this waits for a lock that another process has. Without it, such a lock is an error.

    Raises:
        BlockingIOError: Another process has locked the file, and ``waiting`` is None.
        OSError: The file cannot be opened.
    """
    while True:
        with ExitStack() as opened:
            file = cast("BinaryIO", opened.enter_context(open(path, mode, buffering=0)))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            # Who had the lock before may have removed the file: then this lock keeps nobody out.
            if _is_at(path, file):
                opened.pop_all()
                return file


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
