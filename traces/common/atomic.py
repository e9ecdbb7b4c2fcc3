"""Files that are written whole or not at all, alone or together, files for their owner alone, and passing folders."""

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from traces.common.errors import InputError, RopebridgeError, RunError, unwritable

# Temporary files and their paths inside `written_together`; None outside.
_STAGED: ContextVar[list[tuple[Path, Path]] | None] = ContextVar("_STAGED", default=None)


@contextmanager
def written_together() -> Iterator[None]:
    """Return a context at whose end all files that it has written appear; none appears if anything fails in it.

    Raises:
        InputError: The last step, a file's renaming, fails.
    """
    staged: list[tuple[Path, Path]] = []
    token = _STAGED.set(staged)
    try:
        yield
        for _, path in staged:
            check_place(path)
        for beside, path in staged:
            _rename(beside, path)
    finally:
        _STAGED.reset(token)
        for beside, _ in staged:
            _remove(beside)


def write_bytes_atomically(path: Path | str, data: bytes) -> None:
    """Write a temporary file next to ``path`` and rename it, so that no reader sees a part of the file.

    Inside `written_together` it is renamed at the end of the context.

    Raises:
        InputError: The folder is missing or may not be written, or the path is itself a folder.
        RunError: The disk is full or read-only.
    """
    path = Path(path)
    check_place(path)
    beside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            # Without this, a renamed file can be empty after a power failure.
            os.fsync(file.fileno())
    except OSError as error:
        _remove(beside)
        raise _unwritable(path, error) from error
    except BaseException:
        _remove(beside)
        raise
    staged = _STAGED.get()
    if staged is not None:
        staged.append((beside, path))
        return
    try:
        _rename(beside, path)
    finally:
        _remove(beside)


def _rename(beside: Path, path: Path) -> None:
    try:
        beside.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _remove(beside: Path) -> None:
    # On a file system that has become read-only there is nothing to remove, and the attempt fails.
    with suppress(OSError):
        beside.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> RopebridgeError:
    if full := unwritable(OSError(error.errno, error.strerror, str(path))):
        return RunError(full)
    return InputError(f"cannot be written: {error.strerror}", where=str(path), valid="choose another folder")


def check_place(path: Path) -> None:
    """Check that a file can be written at a path.

    Raises:
        InputError: The folder is missing or may not be entered, the path is a folder or a special file, or the path is
            too long.
    """
    try:
        is_folder, is_in_folder = path.is_dir(), path.parent.is_dir()
        is_special = path.exists() and not is_folder and not path.is_file()
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", str(path), "choose another folder") from error
    if is_folder:
        raise InputError("is a folder", where=str(path), valid="name a file to write")
    if is_special:
        # Renaming a file to the path of a device would replace the device.
        raise InputError("is a device or another special file", where=str(path), valid="name a regular file")
    if not is_in_folder:
        raise InputError(f"the folder '{path.parent}' does not exist", where=str(path), valid="create it first")


def write_text_atomically(path: Path | str, text: str) -> None:
    """Write a text file as UTF-8, whole or not at all; see `write_bytes_atomically`."""
    write_bytes_atomically(path, text.encode())


def write_private_text(path: Path, text: str) -> None:
    """Write a text file that its owner alone can read, in place of any file at ``path``."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def missing_folders(path: Path) -> list[Path]:
    """Return the folders that are missing at a path: the path itself, then those around it, the outermost last."""
    return [each for each in (path, *path.parents) if not each.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of some folders that are empty when their turn comes."""
    for each in folders:
        with suppress(OSError):
            each.rmdir()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder for temporary files of this process, and remove it after the block.

    Folders that killed processes of this user have left there are removed too.
    """
    with passing_folder(Path(tempfile.gettempdir()), "ropebridge-", mode=0o700) as folder:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def passing_folder(place: Path, start: str, end: str = "", mode: int = 0o777) -> Iterator[Path]:
    """Make a folder of a new name in ``place``, which belongs to this process until the end of the block.

    Args:
        place: The folder around it. In it, folders of this user with names like this one's are removed if the process
            whose id and start the name has is dead, and nobody has a lock on the folder.
        start: Start of the name.
        end: End of the name.
        mode: Permissions of the folder.

    Raises:
        OSError: The folder cannot be made.
    """
    _remove_abandoned(place, start, end)
    folder = place / f"{start}{os.getpid()}-{_start_of(os.getpid())}-{secrets.token_hex(4)}{end}"
    folder.mkdir(mode)
    lock = os.open(folder, os.O_RDONLY)
    try:
        # For processes of other containers, which see other ids. A file system need not have locks.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(lock)


def has_passing_folder(place: Path, start: str, end: str = "") -> bool:
    """Return whether a living process of this machine has a `passing_folder` of such a name."""
    return any(is_alive for _, is_alive in _passing_folders(place, start, end))


def _passing_folders(place: Path, start: str, end: str) -> Iterator[tuple[Path, bool]]:
    """Yield passing folders, each with whether the process is alive that made it."""
    name = re.compile(rf"{re.escape(start)}(\d+)-(\d+)-[0-9a-f]{{8}}{re.escape(end)}")
    for path in place.iterdir():
        if found := name.fullmatch(path.name):
            yield path, _start_of(int(found[1])) == int(found[2])


def _remove_abandoned(place: Path, start: str, end: str) -> None:
    for path, is_alive in _passing_folders(place, start, end):
        if is_alive:
            continue
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _start_of(process: int) -> int:
    """Return when a process of this machine has started, in ticks since the machine has; 0 if there is none.

    A process that has ended, and for whose status nobody has asked yet, is none.
    """
    try:
        # proc(5): the state is the first field after the name in parentheses, the start the twentieth.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
