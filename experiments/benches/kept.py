"""Results of a bench that are kept in a folder, so that a bench that was interrupted goes on."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.benches.result import Row
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError


class KeptResults:
    """JSON documents by name, each in a file of its own.

    Names may have any characters; in the name of the file each run of others than ASCII letters and digits is a hyphen.

    If what was measured or the machine has changed, choose another folder: this is not noticed.

    Args:
        folder: The folder, which is made if it does not exist; None to keep nothing.

    Raises:
        InputError: The folder cannot be made.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem, advice = f"no folder can be made here: {error.strerror}", "choose another folder"
                raise InputError(problem, where=str(folder), valid=advice) from error

    def read(self, name: str) -> Any:
        """Return a document; None if there is none. Raise `InputError` if its file is damaged."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self.damaged(name) from error

    def write(self, name: str, document: Any) -> None:
        """Write a document."""
        path = self._path(name)
        if path is not None:
            write_text_atomically(path, json.dumps(document))

    def rows(
        self, name: str, measure: Callable[[], list[Row]], is_result: Callable[[Row], bool] = lambda row: True
    ) -> list[Row]:
        """Return the kept rows of a case, or else measure them, and keep them if each ``is_result``.

        Raises:
            InputError: The case's file is damaged.
        """
        document = self.read(name)
        if document is None:
            document = measure()
            if all(map(is_result, document)):
                self.write(name, document)
        if not isinstance(document, list) or not document or not all(isinstance(row, dict) for row in document):
            raise self.damaged(name)
        return document

    def damaged(self, name: str) -> InputError:
        """Return the error of a file without the results that it should have."""
        advice = "remove it, and the case is run again"
        return InputError("no results of a case are in this file", where=str(self._path(name)), valid=advice)

    def _path(self, name: str) -> Path | None:
        return self._folder / f"{re.sub('[^A-Za-z0-9]+', '-', name)}.json" if self._folder is not None else None
