"""Actions in pieces: sums of gradients that overlap with one begin between them."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.step.compile import CompiledStep


# A run asks for the same step time after time.
@lru_cache(maxsize=32)
def first_pieces(compiled: CompiledStep) -> NDArray[np.int64]:
    """Return, for each piece, the first one of its action, [actions]."""
    actions = compiled.actions
    identity = np.stack([actions.actor, actions.kind, actions.pipeline, actions.stage, actions.microbatch])
    begins = np.append(True, (identity[:, 1:] != identity[:, :-1]).any(axis=0))
    return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))
