"""States of a data set that can only be read in order, kept beside a run's checkpoints."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

# Number of states that are kept: a run resumes from one of its newest checkpoints.
_KEPT = 6


class StateFolder:
    """A folder of states, each in a file ``position-P.pt``, from which the sample at position P comes next.

    A state only saves the reading of the samples before it, so one that is missing or damaged is no error. All
    processes that read the data set write the same states.

    Args:
        interval: Number of positions between two states.
    """

    def __init__(self, path: Path, interval: int) -> None:
        self._path, self._interval = path, interval

    def is_due(self, position: int) -> bool:
        """Return whether the state at a position is to be kept."""
        return position > 0 and position % self._interval == 0

    def keep(self, position: int, state: Any) -> None:
        """Write the state at a position, and remove old ones."""
        target = self._file(position)
        if target.exists():
            return
        self._path.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        torch.save(state, partial)
        partial.replace(target)
        for old in [each for each in self._positions if each <= position][:-_KEPT]:
            self._file(old).unlink(missing_ok=True)

    def newest(self, position: int) -> tuple[int, Any] | None:
        """Return the last state up to a position that can be read, with its own position; None if there is none."""
        for each in reversed([each for each in self._positions if each <= position]):
            try:
                return each, torch.load(self._file(each), weights_only=True)
            except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
                continue
        return None

    @property
    def _positions(self) -> list[int]:
        found = (path.stem.removeprefix("position-") for path in self._path.glob("position-*.pt"))
        return sorted(int(number) for number in found if number.isdigit())

    def _file(self, position: int) -> Path:
        return self._path / f"position-{position:012d}.pt"
