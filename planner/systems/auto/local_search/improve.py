"""Local search: from plan to better plan by small changes, until none helps or the budget is spent."""

from collections.abc import Callable

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.auto.local_search.neighbours import neighbours

# A change must gain this share, so that the search does not wander on rounding.
LEAST_GAIN = 1e-4


def improve(plan: Plan, scenario: Scenario, judge: Callable[[Plan], float], evaluations: int) -> tuple[Plan, float]:
    """Return the best plan that is found, and its judgement.

    Args:
        plan: Where to start.
        scenario: What it is for.
        judge: What is to be small.
        evaluations: How often the judge may be asked.
    """
    best, best_score = plan, judge(plan)
    left, improved = evaluations - 1, True
    while improved and left > 0:
        improved = False
        for other in neighbours(best, scenario):
            score = judge(other)
            left -= 1
            if score < best_score * (1 - LEAST_GAIN):
                best, best_score, improved = other, score, True
                break
            if left <= 0:
                break
    return best, best_score
