"""The budget of regret: how much time a policy may lose against never changing the first plan of a run.

The budget is `REGRET_SHARE` of the run so far, of an hour in a shorter run. Every step of another plan, and every wait
for layers, is compared with the step that the first plan would have taken on the same links: time that was lost is
taken from the budget, and half of the time that was gained refills it, since predicted steps are wrong by as much as
most gains. While links that the first plan needs are out of sight, nothing refills the budget; what the steps lose if
these links are as expected is at stake, until a probe shows them again. A policy that makes only moves which the budget
can pay with the way back, and returns to the first plan while it can still pay that way, loses no more than the budget,
as far as predicted steps of the first plan are right and the way back takes no longer than expected.
"""

from planner.plan.plan import Plan

# Share of predicted gains that counts.
_COUNTED = 0.5

# Share of a run's time that may be lost, and the shortest run by which it is measured, seconds.
REGRET_SHARE, HOUR_S = 0.02, 3600.0


class RegretBudget:
    """The budget of one run.

    Attributes:
        first: The plan that the run is compared with.
        lost_s: Time lost against this plan so far, less half of the time gained, seconds.
        at_stake_s: Time lost since links are out of sight if these are as declared, seconds.
        elapsed_s: Time of the run so far, seconds.
    """

    def __init__(self, first: Plan) -> None:
        self.first = first
        self.lost_s = 0.0
        self.at_stake_s = 0.0
        self.elapsed_s = 0.0
        # Time of the last step whose links were out of sight, and the least time that the first plan would have taken.
        self._unseen_s = self._least_s = 0.0

    @property
    def left_s(self) -> float:
        """Time that may still be lost, seconds; below zero if too much has been."""
        return REGRET_SHARE * max(self.elapsed_s, HOUR_S) - self.lost_s - self.at_stake_s

    def see(self, duration_s: float, first_s: float) -> None:
        """Count a step in which the first plan's links are seen: it would have taken ``first_s`` seconds.

        What was at stake is lost as far as the first plan is faster than the steps out of sight were.
        """
        lost_s = duration_s - first_s
        self.lost_s += max(lost_s, _COUNTED * lost_s)
        if self.at_stake_s:
            share = (self._unseen_s - first_s) / (self._unseen_s - self._least_s)
            self.lost_s += self.at_stake_s * min(1.0, max(0.0, share))
            self.at_stake_s = 0.0

    def guess(self, duration_s: float, least_s: float) -> None:
        """Count a step with links out of sight: the first plan would have taken ``least_s`` seconds or more."""
        if duration_s > least_s:
            self.at_stake_s += duration_s - least_s
            self._unseen_s, self._least_s = duration_s, least_s
