"""Chooses the static plans that are best in hindsight, and says what changes of the plan could gain on them."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from experiments.benches.planning.adaptation_cases import run_for
from planner.adapt.migration import held_shards, migration_between, migration_time_s
from planner.check import is_possible
from planner.plan.plan import Plan
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario, in_window
from planner.step.graph import Floats
from planner.systems.auto.candidates.compressed import with_compressions
from planner.systems.auto.objective import Objective, contended_step_time_s
from planner.systems.auto.portfolio import searched_once
from planner.systems.auto.strategy import start_plan
from traces.common.errors import InputError

FIRST_MINUTE_S = 60.0

# Length of the windows on which plans are judged, seconds.
WINDOW_S = 10.0

# Most plans of a case that are simulated; the evaluator chooses them.
_MOST_STARTS = 3


def starting_plans(scenario: Scenario, duration_s: float) -> dict[Plan, float]:
    """Return static plans and their simulated throughput over ``duration_s``, samples/s, the best one first.

    They are those of strategy `auto` for the traces, for their means over the whole time and over the first minute,
    each in every format of messages that the scenario allows.
    """
    means = (in_window(scenario, 0.0, end_s) for end_s in (duration_s, FIRST_MINUTE_S))
    found = [start_plan(scenario, Objective()), *(searched_once(each)[0] for each in means)]
    formats = dict.fromkeys(each for plan in found for each in with_compressions(plan, scenario))
    possible = [plan for plan in formats if is_possible(plan, scenario)]
    judged_per_s = _judged_per_s(possible, _windows(scenario, duration_s)).mean(axis=1)
    best = [possible[place] for place in np.argsort(-judged_per_s, kind="stable")[:_MOST_STARTS]]
    per_s = {plan: measure(run_for(duration_s, scenario, plan)).samples_per_s for plan in best}
    return dict(sorted(per_s.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class PossibleGains:
    """Gains over the first of some plans if rates were known ahead, by the evaluator, ratios.

    Attributes:
        free: With the best plan in each window, if changes took no time.
        paid: With the best sequence of plans, if training stops while layers are moved, as it does.
    """

    free: float
    paid: float


def possible_gains(scenario: Scenario, plans: Sequence[Plan], duration_s: float) -> PossibleGains:
    """Return what changes between plans could gain, if a run begins with the first of them."""
    windows = _windows(scenario, duration_s)
    judged_per_s = _judged_per_s(plans, windows)
    first_per_s = float(judged_per_s[0].mean())
    alike: dict[Hashable, list[int]] = {}
    for number, plan in enumerate(plans):
        alike.setdefault(frozenset(held_shards(plan).items()), []).append(number)
    # Changes among plans with the same layers on the same devices take no time.
    per_s = np.stack([judged_per_s[numbers].max(axis=0) for numbers in alike.values()])
    moves_s = _moves_s([plans[numbers[0]] for numbers in alike.values()], windows)
    return PossibleGains(float(judged_per_s.max(axis=0).mean()) / first_per_s, best_mean(per_s, moves_s) / first_per_s)


def _moves_s(plans: Sequence[Plan], windows: Sequence[Scenario]) -> Floats:
    """Return the time of a change from each plan to each other one in each window, seconds, [old, new, windows].

    It is infinite if the change is not possible.
    """
    moves_s = np.zeros((len(plans), len(plans), len(windows)))
    for (old, one), (new, other) in permutations(enumerate(plans), 2):
        try:
            migration = migration_between(one, other, windows[0])
        except InputError:
            moves_s[old, new] = math.inf
        else:
            moves_s[old, new] = [migration_time_s(migration, window, other.connections) for window in windows]
    return moves_s


def best_mean(per_s: Floats, moves_s: Floats) -> float:
    """Return the highest mean throughput of a sequence of plans that begins with the first one, samples/s.

    A change takes the time that it takes in the window in which it begins; no samples are trained in it.

    Args:
        per_s: Throughput of each plan in each window, samples/s, [plans, windows].
        moves_s: Time of the changes, seconds, [old, new, windows].
    """
    plans, windows = len(per_s), len(per_s[0])
    # The most that was trained before each window, by the plan in use, in windows times samples/s.
    most: Floats = np.full((windows + 1, plans), -np.inf)
    most[0, 0] = 0.0
    for window in range(windows):
        most[window + 1] = np.maximum(most[window + 1], most[window] + per_s[:, window])
        for old, new in permutations(range(plans), 2):
            lasts = moves_s[old, new, window] / WINDOW_S
            if window + lasts < windows:
                last = window + int(lasts)
                trained = most[window, old] + (last + 1 - window - lasts) * per_s[new, last]
                most[last + 1, new] = max(most[last + 1, new], trained)
    return float(most[windows].max()) / windows


def _windows(scenario: Scenario, duration_s: float) -> list[Scenario]:
    """Return the scenario with links as they are in the mean of each window."""
    starts_s = (WINDOW_S * number for number in range(int(duration_s / WINDOW_S)))
    return [in_window(scenario, start_s, start_s + WINDOW_S) for start_s in starts_s]


def _judged_per_s(plans: Sequence[Plan], windows: Sequence[Scenario]) -> Floats:
    """Return the throughput of each plan in each window by the evaluator, samples/s, [plans, windows]."""
    return np.array([[plan.global_batch / contended_step_time_s(plan, window) for window in windows] for plan in plans])
