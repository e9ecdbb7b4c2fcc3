"""The orders in which the workers of a pipeline act, as columns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.plan.actions import Action, Kind

# The number of a kind is its place here.
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)

_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True, eq=False, slots=True)
class Orders:
    """The actions of all workers, one worker after the other, each worker's in the order in which it does them.

    Attributes:
        first_action: Where each worker's actions begin, and after the last one the number of all, int64 [workers + 1].
        kind: Number of the kind: 0 is F, 1 is B, 2 is I, 3 is W; int8 [actions].
        stage: int32 [actions].
        microbatch: int32 [actions].
    """

    first_action: NDArray[np.int64]
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]

    @classmethod
    def from_actions(cls, rows: Iterable[Sequence[Action]]) -> "Orders":
        """Return the orders that the rows say, one row per worker."""
        listed = [tuple(row) for row in rows]
        every = [action for row in listed for action in row]
        return cls(
            np.cumsum([0, *map(len, listed)], dtype=np.int64),
            np.array([_NUMBERS[action.kind] for action in every], dtype=np.int8),
            np.array([action.stage for action in every], dtype=np.int32),
            np.array([action.microbatch for action in every], dtype=np.int32),
        )

    @property
    def worker_count(self) -> int:
        """Number of workers."""
        return len(self.first_action) - 1

    def actions(self, worker: int) -> tuple[Action, ...]:
        """Return one worker's actions in order."""
        own = slice(int(self.first_action[worker]), int(self.first_action[worker + 1]))
        columns = zip(self.stage[own].tolist(), self.kind[own].tolist(), self.microbatch[own].tolist(), strict=True)
        return tuple(Action(stage, KINDS[kind], microbatch) for stage, kind, microbatch in columns)
