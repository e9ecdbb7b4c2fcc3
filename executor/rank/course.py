"""A rank's way through a run: the steps of one set-up after the other, and between them layers that change devices."""

from collections.abc import Callable
from typing import NoReturn

from executor.core.messages import Reconfiguration
from executor.core.peers import blaming
from executor.core.program import DeviceProgram
from executor.core.row_log import EventRecorder
from executor.rank.control_client import GenerationEndedError, PlanFeed
from executor.rank.held import RankContext
from executor.rank.part_in_job import RankConfig
from executor.rank.steps import (
    StepSource,
    run_steps,
    watch_steps,
)
from executor.recovery.migration import LayerMoves
from executor.runtime.interpreter import Interpreter
from executor.transport.process_groups import ProcessGroups
from executor.transport.transport import Transport
from planner.plan.plan import Plan


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
