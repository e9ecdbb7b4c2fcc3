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
    """The order of the program, as scheduled; base of the other orders."""

    def __init__(self, current: StepProgram, clock: RunClock) -> None:
        self._work = current.program.work
        self._clock = clock
        self._remaining = len(self._work)

    def next(self) -> tuple[Work, float] | None:
        """Return the next action and the run second since which the device is idle; None after the last action.

        The inputs of the action may still be in transit.
        """
        if not self._remaining:
            return None
        idle_since_s = self._clock.now_s()
        number = self._choose(len(self._work) - self._remaining)
        self._remaining -= 1
        return self._work[number], idle_since_s

    def _choose(self, carried_out: int) -> int:
        """Return the index of the next action in the program, after ``carried_out`` actions."""
        return carried_out

    def arrival(self, work: Work) -> Callable[[RecvHandle], None] | None:
        """Return the callback for messages that ``work`` needs; None if the order does not depend on them."""
        return None

    def finish(self, work: Work) -> None:
        """Note that an action has ended."""


class DynamicOrder(ActionOrder):
    """Chooses, whenever the device is free, a ready action by the priority rule of `planner.schedules.dynamic`."""

    def __init__(self, current: StepProgram, scenario: Scenario, clock: RunClock) -> None:
        super().__init__(current, clock)
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
        """Return a callback that counts a message of ``work`` as arrived; the loss of a peer is raised when waiting."""

        def arrived(handle: RecvHandle) -> None:
            with self._changed:
                self._choice.arrive(work.action)
                self._changed.notify()

        return arrived

    def finish(self, work: Work) -> None:
        """Note that an action has ended, which may make others ready."""
        with self._changed:
            self._choice.finish(work.action)


class LeaderOrder(DynamicOrder):
    """The dynamic order of a tensor-parallel group's first device, which broadcasts each choice to its partners."""

    def __init__(self, current: StepProgram, scenario: Scenario, clock: RunClock, group: TensorGroup) -> None:
        super().__init__(current, scenario, clock)
        self._group = group

    def _choose(self, carried_out: int) -> int:
        return self._group.broadcast_number(super()._choose(carried_out))


class PartnerOrder(ActionOrder):
    """The order that the first device of a tensor-parallel group broadcasts."""

    def __init__(self, current: StepProgram, clock: RunClock, group: TensorGroup) -> None:
        super().__init__(current, clock)
        self._group = group

    def _choose(self, carried_out: int) -> int:
        return self._group.broadcast_number(0)


def action_order(current: StepProgram, scenario: Scenario, clock: RunClock, group: TensorGroup | None) -> ActionOrder:
    """Return the order that the step's plan asks for, the same one on all ranks of a tensor-parallel group."""
    if current.plan.order != "dynamic":
        return ActionOrder(current, clock)
    if group is None:
        return DynamicOrder(current, scenario, clock)
    return LeaderOrder(current, scenario, clock, group) if group.leads else PartnerOrder(current, clock, group)
