"""The order of a rank's actions in a step: as scheduled, or dynamic (of the ready actions, the highest priority)."""

import threading
from collections.abc import Callable

from executor.core.clock import RunClock
from executor.core.step_program import StepProgram, Work
from executor.training.tensor_parallel import TensorGroup
from executor.transport.receive import RecvHandle
from planner.cost.stage import scheduling_problems
from planner.scenario.scenario import Scenario
from planner.schedules.dynamic import DynamicChoice


class ActionOrder:
    """The order of actions in the rank's program.

    Args:
        group: The tensor-parallel group whose first device broadcasts each choice to the others; None if this rank
            chooses alone.
    """

    def __init__(self, current: StepProgram, clock: RunClock, group: TensorGroup | None = None) -> None:
        self._work = current.program.work
        self._clock = clock
        self._group = group
        self._remaining = len(self._work)

    def next(self) -> tuple[Work, float] | None:
        """Return the next action and the run second since which the device is idle; None after the last action.

        The inputs of the action may still be in transit.
        """
        if not self._remaining:
            return None
        idle_since_s = self._clock.now_s()
        number = self._choose(len(self._work) - self._remaining)
        if self._group is not None:
            # On all other devices of the group the first device's choice replaces the rank's own.
            number = self._group.broadcast_number(number)
        self._remaining -= 1
        return self._work[number], idle_since_s

    def _choose(self, carried_out: int) -> int:
        """Return the index of the next action in the program, after ``carried_out`` actions."""
        return carried_out

    def arrival(self, work: Work) -> Callable[[RecvHandle], None] | None:
        """Return a function to call when a message for ``work`` has arrived; None if the order ignores arrivals."""
        return None

    def finish(self, work: Work) -> None:
        """Record that an action has ended."""


class DynamicOrder(ActionOrder):
    """Chooses, whenever the device is free, a ready action by the priority rule of `planner.schedules.dynamic`."""

    def __init__(
        self, current: StepProgram, scenario: Scenario, clock: RunClock, group: TensorGroup | None = None
    ) -> None:
        super().__init__(current, clock, group)
        pipeline = current.plan.pipelines[current.program.pipeline]
        self._index = {work.action: index for index, work in enumerate(self._work)}
        self._choice = DynamicChoice(
            scheduling_problems(current.plan, scenario)[current.program.pipeline],
            pipeline.workers[current.program.stage],
            {work.action: len(work.receives) for work in self._work},
        )
        self._changed = threading.Condition()

    def _choose(self, carried_out: int) -> int:
        with self._changed:
            while (action := self._choice.best()) is None:
                self._changed.wait()
            self._choice.start(action)
        return self._index[action]

    def arrival(self, work: Work) -> Callable[[RecvHandle], None]:
        """Return a function that counts a message for ``work`` as arrived, also if the sender is lost.

        The loss is raised later, when the interpreter waits for the message.
        """

        def arrived(handle: RecvHandle) -> None:
            with self._changed:
                self._choice.arrive(work.action)
                self._changed.notify()

        return arrived

    def finish(self, work: Work) -> None:
        """Record that an action has ended, which may make other actions ready."""
        with self._changed:
            self._choice.finish(work.action)


def action_order(current: StepProgram, scenario: Scenario, clock: RunClock, group: TensorGroup | None) -> ActionOrder:
    """Return the order that the step's plan asks for, the same one on all ranks of a tensor-parallel group."""
    if current.plan.order != "dynamic":
        return ActionOrder(current, clock)
    if group is None or group.leads:
        return DynamicOrder(current, scenario, clock, group)
    return ActionOrder(current, clock, group)
