"""Search for the rules with which list scheduling gives the least makespan on one problem.

The search first tries eight common rules at growing depths. After that, it makes small random changes to the rules with
the least makespan so far, and keeps a change if the makespan gets no longer. If microbatches differ, a change may also
swap two microbatches in the order in which microbatches enter the pipeline.
"""

import numpy as np
from numba import njit
from numpy.random import Generator

from planner.schedules.kernel.arrays import Tables
from planner.schedules.kernel.list_scheduling import Rules, list_schedule
from planner.schedules.kernel.problem import Ints

# Approximate limit on the number of depths at which the common rules are tried.
_DEPTHS = 12
# Largest value of `Rules.pending` that a random change sets.
_MOST_PENDING = 3
# Shares that a random change sets are multiples of 1 / `_QUARTERS`.
_QUARTERS = 4


@njit(cache=True)
def search_rules(
    tables: Tables, first: Ints, most_live: Ints, trials: int, goal_s: float, random: Generator
) -> tuple[float, Ints]:
    """Return the least makespan found, seconds, infinite if none, and its actions as integers, int64 [actions].

    The actions are F (forward), I (input gradient) and W (weight gradient): backwards are split.

    Args:
        tables: Arrays of the problem.
        first: Index of each worker's first action, [workers + 1].
        most_live: Upper limits of `Rules.live`, [stages].
        trials: Number of sets of rules to try.
        goal_s: Makespan at which the search ends early, seconds: a lower bound.
        random: Random generator that chooses the changes.
    """
    best, trial = _rules(tables), _rules(tables)
    sequence, best_sequence = np.empty(first[-1], np.int64), np.empty(first[-1], np.int64)
    best_s, count, depth = np.inf, 0, 0
    deepest = int(np.max(most_live))
    step = max(1, deepest // _DEPTHS)
    while count < trials and best_s > goal_s:
        starting = depth <= deepest
        if starting:
            _set_common(trial, most_live, depth, count % 8)
            depth += step if count % 8 == 7 else 0
        else:
            _copy(best, trial)
            for _ in range(random.integers(1, 3)):
                _change(trial, most_live, tables.equal_microbatches, random)
        count += 1
        makespan_s = list_schedule(tables, trial, first, best_s, sequence)
        if makespan_s < best_s or (makespan_s == best_s and not starting):
            _copy(trial, best)
            if makespan_s < best_s:
                best_s = makespan_s
                best_sequence[:] = sequence
    return best_s, best_sequence


@njit(cache=True)
def _rules(tables: Tables) -> Rules:
    stages, microbatches = tables.activation_bytes.shape
    ones, shares = np.ones(stages, np.int64), np.zeros((2, stages))
    first_backward = np.ones(stages, np.bool_)
    return Rules(True, np.arange(microbatches), ones, first_backward, shares[0], shares[1], ones.copy())


@njit(cache=True, forceinline=True)
def _set_common(rules: Rules, most_live: Ints, depth: int, choice: int) -> None:
    """Set one of eight common sets of rules; stage s of P may hold 1F1B's P - s plus ``depth`` microbatches."""
    stages = len(most_live)
    rules.live[:] = np.maximum(1, np.minimum(most_live, np.arange(stages, 0, -1) + depth))
    rules.backward_first[:] = choice % 2 == 0
    rules.gap_share[:] = 0.5 if choice // 2 % 2 else 0.0
    rules.wait_share[:] = 0.5 if choice // 4 else 0.0
    rules.pending[:] = len(rules.entry)


@njit(cache=True, forceinline=True)
def _change(rules: Rules, most_live: Ints, equal_microbatches: bool, random: Generator) -> None:
    """Change one rule of one stage at random, or swap two microbatches that differ."""
    stage = random.integers(0, len(most_live))
    what = random.integers(0, 6 if equal_microbatches else 9)
    if what <= 1:
        rules.live[stage] = max(1, min(most_live[stage], rules.live[stage] + random.integers(-2, 3)))
    elif what == 2:
        unlimited = random.random() < 0.3
        rules.pending[stage] = len(rules.entry) if unlimited else random.integers(1, _MOST_PENDING + 1)
    elif what == 3:
        rules.backward_first[stage] = not rules.backward_first[stage]
    elif what == 4:
        rules.gap_share[stage] = random.integers(0, _QUARTERS + 1) / _QUARTERS
    elif what == 5:
        rules.wait_share[stage] = random.integers(0, _QUARTERS + 1) / _QUARTERS
    else:
        one, other = random.integers(0, len(rules.entry)), random.integers(0, len(rules.entry))
        rules.entry[one], rules.entry[other] = rules.entry[other], rules.entry[one]


@njit(cache=True)
def _copy(source: Rules, target: Rules) -> None:
    target.entry[:] = source.entry
    target.live[:] = source.live
    target.backward_first[:] = source.backward_first
    target.wait_share[:] = source.wait_share
    target.gap_share[:] = source.gap_share
    target.pending[:] = source.pending
