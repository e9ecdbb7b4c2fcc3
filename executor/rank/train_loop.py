"""A rank's way through a run: the steps of one set-up after the other, and between them layers that change devices."""

from collections.abc import Callable
from typing import NoReturn

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.core.failures import blaming
from executor.core.messages import NewPlan, Reconfiguration
from executor.core.step_program import DeviceProgram, StepProgram
from executor.rank.context import RankConfig, RankContext
from executor.rank.control_client import GenerationEndedError, PlanFeed
from executor.recovery.migration import LayerMoves
from executor.runtime.interpreter import Interpreter
from executor.transport.rendezvous import ProcessGroups
from executor.transport.transport import Transport
from planner.plan.plan import Plan


class StepSource:
    """Knows a device's program in each step of one set-up, which ends where everything is set up anew.

    Args:
        program_of: Gives the device's program under a plan.
        first: The first of these steps.
        plan: Of the first one, and of all if nobody feeds others.
        steps: How many the whole run has.
        feed: Gives the plans that a policy decides on; None if there is none.
    """

    def __init__(
        self, program_of: Callable[[Plan], DeviceProgram], first: int, plan: Plan, steps: int, feed: PlanFeed | None
    ) -> None:
        self._program_of = program_of
        self.first = first
        self._plan = plan
        self.steps = steps
        self._feed = feed

    def known(self, step: int) -> StepProgram | None:
        """Return a step if its plan is known already; None after the last one of this set-up."""
        plan = NewPlan(self._plan) if self._feed is None else self._feed.known(step)
        return None if step >= self.steps or plan is None or self._is_over(plan, step) else self._under(plan, step)

    def is_decided(self, step: int) -> bool:
        """Return whether it is known what a step runs, in whichever set-up."""
        return self._feed is None or self._feed.known(step) is not None

    def wait(self, step: int) -> StepProgram | NewPlan:
        """Return a step once its plan is known; if everything is set up anew for it, the plan alone."""
        assert self._feed is not None, "without a feed every step is known"
        plan = self._feed.wait(step)
        return plan if self._is_over(plan, step) else self._under(plan, step)

    def _is_over(self, plan: NewPlan, step: int) -> bool:
        return _begins_another(plan, step, self.first)

    def _under(self, plan: NewPlan, step: int) -> StepProgram:
        return StepProgram(step, plan.plan, self._program_of(plan.plan))


def run_steps(
    source: StepSource, interpreter: Interpreter, clock: RunClock, begins_with: int
) -> Reconfiguration | None:
    """Carry out all steps of a set-up; return why it ends, None if the run does.

    Args:
        source: Gives them.
        interpreter: Carries them out.
        clock: Of the run.
        begins_with: The first step of the run, which nobody begins before its clock does.
    """
    change = None
    for step in range(source.first, source.steps):
        current: StepProgram | NewPlan | None = source.known(step)
        ready_s = float("-inf")
        if current is None:
            late = not source.is_decided(step)
            current = source.wait(step)
            ready_s = clock.now_s() if late else ready_s
        if isinstance(current, NewPlan):
            change = Reconfiguration(step, current, ready_s)
            break
        if step == begins_with:
            interpreter.post(current)
            clock.sleep_until(0.0)
            ready_s = clock.now_s()
        interpreter.run(current, source.known, ready_s)
    interpreter.close()
    return change


def watch_steps(first: int, steps: int, feed: PlanFeed, clock: RunClock) -> Reconfiguration | None:
    """Follow the steps of a set-up in which this rank has no part; return why it ends, None if the run does.

    Args:
        first: Of the steps.
        steps: How many the whole run has.
        feed: Is told of every step, and knows its plan.
        clock: Of the run.
    """
    for step in range(first, steps):
        plan = feed.wait(step)
        if _begins_another(plan, step, first):
            return Reconfiguration(step, plan, clock.now_s())
        feed.finish(step)
    return None


def _begins_another(plan: NewPlan, step: int, first: int) -> bool:
    """Whether a step begins another set-up than the one that began with ``first``."""
    return plan.moves is not None and step > first


class TrainLoop:
    """The set-ups of one rank in one generation.

    Args:
        part: This rank's in the job.
        held: By its process.
        feed: Gives the plans that a policy decides on; None if there is none.
        interpreter_of: Makes what carries the steps of a set-up out, given its plan and its first step.
        transport: Moves bytes.
        groups: Over which it does.
        rows: Takes what happened.
    """

    def __init__(
        self,
        part: RankConfig,
        held: RankContext,
        feed: PlanFeed | None,
        interpreter_of: Callable[[Plan, int], Interpreter],
        transport: Transport,
        groups: ProcessGroups,
        rows: EventRecorder,
    ) -> None:
        self._part = part
        self._held = held
        self._feed = feed
        self._interpreter_of = interpreter_of
        self._transport = transport
        self._groups = groups
        self._rows = rows

    def run(self, first: int, plan: Plan) -> None:
        """Carry out all steps from ``first`` on, which runs ``plan``.

        Raises:
            GenerationEndedError: Devices have a part in a later plan that the generation does not have.
        """
        change = self._carry_out(first, plan)
        while change is not None:
            if change.to.joins:
                self._let_join(change.step)
            self._set_up(change)
            change = self._carry_out(change.step, change.to.plan)

    def _carry_out(self, first: int, plan: Plan) -> Reconfiguration | None:
        steps, clock = self._part.orders.steps, self._held.clock
        if self._part.device not in plan.devices:
            assert self._feed is not None, "without a policy every rank has a part in the plan"
            if self._held.safekeeping is not None:
                self._held.safekeeping.rest()
            return watch_steps(first, steps, self._feed, clock)
        source = StepSource(self._own_program, first, plan, steps, self._feed)
        return run_steps(source, self._interpreter_of(plan, first), clock, self._part.orders.first_step)

    def _own_program(self, plan: Plan) -> DeviceProgram:
        program = self._part.program(plan)
        assert program is not None, "within a set-up the same devices have a part in every plan"
        return program

    def _let_join(self, step: int) -> NoReturn:
        """Keep the layers as they are before a step, with which all begin anew, others among them."""
        assert self._feed is not None
        assert self._held.safekeeping is not None, "without copies all devices are in the one generation"
        self._held.safekeeping.copy(step)
        self._feed.outcome()
        raise GenerationEndedError

    def _set_up(self, change: Reconfiguration) -> None:
        """Hand over and take up what moves; nobody waits for anything else."""
        plan, held = change.to.plan, self._held
        held.compute.wait_until(change.ready_s)
        with blaming("one of the others"):
            self._groups.use(plan.connections)
        moves = LayerMoves(self._part.device, change, self._transport, held.compute, self._rows)
        moves.expect()
        moves.send(held.compute.layer_state)
        held.compute.hold(plan, self._part.program(plan))
        if held.safekeeping is not None:
            held.safekeeping.take_up(plan)
        moves.take()
