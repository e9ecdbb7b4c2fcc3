"""A scenario's document with other values at some places, in whichever of its files these stand."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.sweep.paths import Keys, with_value
from planner.files.documents import Document, Location
from traces.common.errors import InputError


class AlteredDocument(Document):
    """A document that says something else at some places; its lines are those of the file.

    Args:
        original: As it is in the file.
        changes: Values by path. Those behind a key that names another file alter what is in that file.
        read: Gives the documents that this one names.

    Raises:
        InputError: A path leads nowhere.
    """

    def __init__(self, original: Document, changes: Mapping[Keys, Any], read: Callable[[Path], Document]) -> None:
        self.path = original.path
        self.value = original.value
        self._original = original
        self._read = read
        self._of_parts: dict[str, dict[Keys, Any]] = {}
        # What replaces a whole comes before what replaces a part of it.
        for keys, value in sorted(changes.items(), key=lambda change: len(change[0])):
            if len(keys) > 1 and isinstance(self.value, Mapping) and isinstance(self.value.get(keys[0]), str):
                self._of_parts.setdefault(keys[0], {})[keys[1:]] = value
            else:
                try:
                    self.value = with_value(self.value, keys, value)
                except InputError as error:
                    raise error.within(str(self.path)) from None

    def where(self, location: Location) -> str:
        """Return file, line and key path of a place in the document."""
        return self._original.where(location)

    def part(self, key: str) -> Document:
        """Return the document in the file that a key names, altered likewise.

        Raises:
            InputError: There is none, or a path leads nowhere in it.
        """
        document = self._read(self.path.parent / self.value[key])
        changes = self._of_parts.get(key)
        return AlteredDocument(document, changes, self._read) if changes else document
