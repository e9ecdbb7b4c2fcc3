"""Files that are written whole or not at all."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from traces.common.errors import InputError


def write_bytes_atomically(path: Path | str, data: bytes) -> None:
    """Write a temporary file next to ``path`` and rename it, so that no reader sees a part of the file.

    Raises:
        InputError: The folder is missing or may not be written, or the path is itself a folder.
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
        beside.replace(path)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", where=str(path), valid="choose another folder"
        ) from error
    finally:
        # On a file system that has become read-only there is nothing to remove, and the attempt fails.
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Check that a file can be written at a path.

    Raises:
        InputError: The folder is missing or may not be entered, the path is a folder, or the path is too long.
    """
    try:
        is_folder, is_in_folder = path.is_dir(), path.parent.is_dir()
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", str(path), "choose another folder") from error
    if is_folder:
        raise InputError("is a folder", where=str(path), valid="name a file to write")
    if not is_in_folder:
        raise InputError(f"the folder '{path.parent}' does not exist", where=str(path), valid="create it first")


def write_text_atomically(path: Path | str, text: str) -> None:
    """Write a text file as UTF-8, whole or not at all; see `write_bytes_atomically`."""
    write_bytes_atomically(path, text.encode())
