"""Files that a command will write: whether they can be is asked before the work that fills them."""

import os
from collections.abc import Iterable
from pathlib import Path

from traces.common.atomic import check_place
from traces.common.errors import InputError


def check_targets(paths: Iterable[Path | None]) -> None:
    """Refuse files that cannot be written; None stands for one that nobody asks for.

    Raises:
        InputError: A path is a folder, its folder is missing, or nothing can be written there.
    """
    for path in paths:
        if path is not None:
            _check_target(path)


def _check_target(path: Path) -> None:
    check_place(path)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(
            f"the folder '{path.parent}' may not be written", where=str(path), valid="choose a place that can"
        )
