"""In which order a rank carries out the actions of a step: as scheduled, or the best of what is ready."""

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from executor.core.clock import RunClock
from executor.core.step_program import StepProgram, Work
from executor.training.tensor_parallel import TensorGroup
from executor.transport.receive import RecvHandle
from planner.cost.stage import scheduling_problems
from planner.plan.actions import Action
from planner.scenario.scenario import Scenario
from planner.schedules.dynamic import DynamicChoice


class ActionOrder(Protocol):
    """Says what comes next."""

    def next(self) -> tuple[Work, float] | None:
        """Return what comes next, and since when the device has had nothing to do (run seconds); None at the end.

        What it waits for may still be on its way.
        """

    def arrival(self, work: Work) -> Callable[[RecvHandle], None] | None:
        """Return what is to be told when a message that ``work`` waits for has arrived."""

    def finish(self, work: Work) -> None:
        """Take note that an action has ended."""


class ScheduledOrder:
    """The order of the program."""

    def __init__(self, current: StepProgram, clock: RunClock) -> None:
        self._rest = iter(current.program.work)
        self._clock = clock

    def next(self) -> tuple[Work, float] | None:
        """Return the next action of the program."""
        work = next(self._rest, None)
        return None if work is None else (work, self._clock.now_s())

    def arrival(self, work: Work) -> Callable[[RecvHandle], None] | None:
        """Nobody is told: who comes to the action waits for its messages."""
        return None

    def finish(self, work: Work) -> None:
        """Nothing follows from it."""


class DynamicOrder:
    """The best action that is ready, by the rule of `planner.schedules.dynamic`."""

    def __init__(self, current: StepProgram, scenario: Scenario, clock: RunClock) -> None:
        pipeline = current.plan.pipelines[current.program.pipeline]
        work = current.program.work
        self._work: Mapping[Action, Work] = {each.action: each for each in work}
        self._choice = DynamicChoice(
            scheduling_problems(current.plan, scenario)[current.program.pipeline],
            pipeline.workers[current.program.stage],
            {each.action: len(each.receives) for each in work},
        )
        self._clock = clock
        self._changed = threading.Condition()

    def next(self) -> tuple[Work, float] | None:
        """Return the best action, when there is one."""
        idle_since_s = self._clock.now_s()
        with self._changed:
            if not self._choice.remaining:
                return None
            while (action := self._choice.best()) is None:
                self._changed.wait()
            self._choice.start(action)
        return self._work[action], idle_since_s

    def arrival(self, work: Work) -> Callable[[RecvHandle], None] | None:
        """Arrivals make actions ready; so does the loss of a peer, which shows when the action takes its message."""

        def arrived(receipt: RecvHandle) -> None:
            with self._changed:
                self._choice.arrive(work.action)
                self._changed.notify()

        return arrived

    def finish(self, work: Work) -> None:
        """Take note of what the action makes ready."""
        with self._changed:
            self._choice.finish(work.action)


def action_order(current: StepProgram, scenario: Scenario, clock: RunClock) -> ActionOrder:
    """Return the order that the step's plan asks for."""
    if current.plan.order == "dynamic":
        return DynamicOrder(current, scenario, clock)
    return ScheduledOrder(current, clock)


class AnnouncedOrder:
    """The first device's order; it says each choice to its partners."""

    def __init__(self, order: ActionOrder, current: StepProgram, group: TensorGroup) -> None:
        self._order = order
        self._number = {work.action: number for number, work in enumerate(current.program.work)}
        self._group = group

    def next(self) -> tuple[Work, float] | None:
        """Return what comes next, when the partners have heard of it."""
        upcoming = self._order.next()
        if upcoming is not None:
            self._group.broadcast_number(self._number[upcoming[0].action])
        return upcoming

    def arrival(self, work: Work) -> Callable[[RecvHandle], None] | None:
        """As the order itself."""
        return self._order.arrival(work)

    def finish(self, work: Work) -> None:
        """As the order itself."""
        self._order.finish(work)


class FollowedOrder:
    """A partner's order: what the first device says."""

    def __init__(self, current: StepProgram, clock: RunClock, group: TensorGroup) -> None:
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
        return self._work[self._group.broadcast_number(0)], idle_since_s

    def arrival(self, work: Work) -> Callable[[RecvHandle], None] | None:
        """The first device receives for its partners."""
        return None

    def finish(self, work: Work) -> None:
        """Nothing follows from it."""


def group_order(current: StepProgram, scenario: Scenario, clock: RunClock, group: TensorGroup | None) -> ActionOrder:
    """Return the order that the step's plan asks for, the same one in all of a tensor-parallel group."""
    if group is None or current.plan.order != "dynamic":
        return action_order(current, scenario, clock)
    if group.leads:
        return AnnouncedOrder(action_order(current, scenario, clock), current, group)
    return FollowedOrder(current, clock, group)
