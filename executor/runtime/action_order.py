"""In which order a rank carries out the actions of a step: as scheduled, or the best of what is ready."""

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from executor.core.clock import RunClock
from executor.core.program import Work
from executor.core.step_program import StepProgram
from executor.transport.receive import RecvHandle
from planner.cost.stage import scheduling_problems
from planner.plan.actions import Action
from planner.scenario.scenario import Scenario
from planner.schedules.dynamic_choice import DynamicChoice


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
    """The best action that is ready, by the rule of `planner.schedules.dynamic_choice`."""

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
