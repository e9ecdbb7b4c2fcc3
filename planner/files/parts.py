"""One part of a scenario, wherever it is written."""

from pathlib import Path
from typing import TypeVar

from planner.files.documents import Document, Location
from planner.files.parsing import parse
from traces.common.errors import InputError

Entry = TypeVar("Entry")


class Part:
    """One part of a scenario: a key of its document, or all of the file that the key names."""

    def __init__(self, document: Document, key: str) -> None:
        value = document.value[key]
        if isinstance(value, str):
            try:
                self.document = document.part(key)
            except InputError as error:
                raise InputError(
                    f"{error.problem}: '{value}'", where=document.where((key,)), valid=error.valid
                ) from None
            self.value, self.location = self.document.value, ()
        else:
            self.document, self.value, self.location = document, value, (key,)

    location: Location

    def parse(self, kind: type[Entry]) -> Entry:
        """Return the part as a ``kind``; raises InputError for the first thing in it that is wrong."""
        return parse(kind, self.document, self.value, self.location)

    def where(self, *inner: int | str) -> str:
        """Return file, line and key path of a place inside the part."""
        return self.document.where((*self.location, *inner))

    def path(self, name: str) -> Path:
        """A path written in this part, which is relative to its file."""
        return self.document.path.parent / name
