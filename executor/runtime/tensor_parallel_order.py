"""The partners of a tensor-parallel group do what its first device does, also where that chooses as it goes."""

from collections.abc import Callable

from executor.core.clock import RunClock
from executor.core.program import Work
from executor.core.step_program import StepProgram
from executor.runtime.action_order import ActionOrder, action_order
from executor.training.tensor_parallel.layers import RankGroup
from executor.transport.receive import RecvHandle
from planner.scenario.scenario import Scenario


class AnnouncedOrder:
    """The first device's order; it says each choice to its partners."""

    def __init__(self, order: ActionOrder, current: StepProgram, group: RankGroup) -> None:
        self._order = order
        self._number = {work.action: number for number, work in enumerate(current.program.work)}
        self._group = group

    def next(self) -> tuple[Work, float] | None:
        """Return what comes next, when the partners have heard of it."""
        upcoming = self._order.next()
        if upcoming is not None:
            self._group.announce(self._number[upcoming[0].action])
        return upcoming

    def arrival(self, work: Work) -> Callable[[RecvHandle], None] | None:
        """As the order itself."""
        return self._order.arrival(work)

    def finish(self, work: Work) -> None:
        """As the order itself."""
        self._order.finish(work)


class FollowedOrder:
    """A partner's order: what the first device says."""

    def __init__(self, current: StepProgram, clock: RunClock, group: RankGroup) -> None:
        self._work = current.program.work
        self._left = len(self._work)
        self._clock = clock
        self._group = group

    def next(self) -> tuple[Work, float] | None:
        """Return what the first device has begun."""
        if not self._left:
            return None
        self._left -= 1
        idle_since_s = self._clock.now_s()
        return self._work[self._group.announce(0)], idle_since_s

    def arrival(self, work: Work) -> Callable[[RecvHandle], None] | None:
        """The first device receives for its partners."""
        return None

    def finish(self, work: Work) -> None:
        """Nothing follows from it."""


def group_order(current: StepProgram, scenario: Scenario, clock: RunClock, group: RankGroup | None) -> ActionOrder:
    """Return the order that the step's plan asks for, the same one in all of a tensor-parallel group."""
    if group is None or current.plan.order != "dynamic":
        return action_order(current, scenario, clock)
    if group.leads:
        return AnnouncedOrder(action_order(current, scenario, clock), current, group)
    return FollowedOrder(current, clock, group)
