"""Orders of three phases: a warm-up of forwards, a backward and a forward in turn, and the remaining backwards.

Actions are F (forward), B (backward), I (input gradient) and W (weight gradient). 1F1B, ZB-H1 and ZB-H2 differ only in
two numbers per stage: the depth, which is the number of forwards before the first backward, and the deferral, which is
the number of W that may wait. A stage runs fewer forwards ahead of its backwards than its depth in two cases: if the
preceding stage runs fewer, since the order could deadlock otherwise, or if memory is too small.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.plan.actions import Action, Kind
from planner.schedules.kernel.problem import FORWARD, GRACE, KINDS, Floats, Orders, SchedulingProblem
from traces.common.errors import InputError


def steady_state_orders(
    problem: SchedulingProblem, depths: Sequence[int], deferrals: Sequence[int] | None = None
) -> Orders:
    """Return the orders of a pipeline in which every worker holds one stage.

    ``depths`` limits the forwards of a stage before its first backward, [stages]; ``deferrals`` limits the W of a stage
    that wait after an I, [stages], and is None for unsplit backwards (B).

    Raises:
        InputError: A microbatch does not fit into a worker's memory.
    """
    change_bytes, recomputed_bytes = problem.change_bytes, problem.recomputed_bytes
    reserve_bytes = problem.reserve_bytes
    rows: dict[int, list[Action]] = {}
    begun_before = [problem.microbatches] * problem.microbatches
    for stage, worker in enumerate(problem.workers):
        capacity_bytes = float(problem.capacity_bytes[worker]) * (1 + GRACE)
        builder = _StageOrder(
            stage,
            None if deferrals is None else deferrals[stage],
            change_bytes[:, stage],
            recomputed_bytes[stage],
            capacity_bytes,
            capacity_bytes - float(reserve_bytes[worker]),
        )
        begun_before = builder.fill(depths[stage], begun_before)
        rows[worker] = builder.actions
    return Orders.from_actions(rows[worker] for worker in range(problem.worker_count))


@dataclass(slots=True)
class _StageOrder:
    """Puts the actions of one stage in order; forwards leave memory free for what one backward recomputes."""

    stage: int
    deferral: int | None
    change_bytes: Floats
    recomputed_bytes: Floats
    capacity_bytes: float
    forward_capacity_bytes: float
    actions: list[Action] = field(default_factory=list)
    pending_weights: deque[int] = field(default_factory=deque)
    held_bytes: float = 0.0
    begun: int = 0

    def fill(self, depth: int, begun_before: Sequence[int]) -> list[int]:
        """Add all actions, and return the number of forwards before each backward, [microbatches].

        ``begun_before`` is the result for the preceding stage; the numbers of this stage are not above it.
        """
        begun = []
        for microbatch, limit in enumerate(begun_before):
            target = min(len(self.recomputed_bytes), microbatch + max(depth, 1), limit)
            while self.begun < target and self._make_room(microbatch):
                self._add(Kind.FORWARD, self.begun)
                self.begun += 1
            begun.append(self.begun)
            self._add_backward(microbatch)
        self._add_weights(0)
        return begun

    def _add_backward(self, microbatch: int) -> None:
        if self.deferral is None:
            self._add(Kind.BACKWARD, microbatch)
            return
        while self.pending_weights and self.held_bytes + self.recomputed_bytes[microbatch] > self.capacity_bytes:
            self._add_weights(len(self.pending_weights) - 1)
        self._add(Kind.BACKWARD_INPUT, microbatch)
        self.pending_weights.append(microbatch)
        self._add_weights(self.deferral)

    def _make_room(self, microbatch: int) -> bool:
        """Add pending W until the next forward fits into memory; return False if it fits only after a backward."""
        forward_bytes = float(self.change_bytes[FORWARD, self.begun])
        while self.held_bytes + forward_bytes > self.forward_capacity_bytes:
            if self.pending_weights:
                self._add_weights(len(self.pending_weights) - 1)
            elif self.begun > microbatch:
                return False
            else:
                raise InputError(
                    f"microbatch {microbatch} takes {forward_bytes:.0f} bytes of activations in stage {self.stage}, "
                    f"whose worker has room for {self.forward_capacity_bytes:.0f}",
                    valid="take smaller microbatches or a device with more memory",
                )
        return True

    def _add_weights(self, remaining: int) -> None:
        while len(self.pending_weights) > remaining:
            self._add(Kind.BACKWARD_WEIGHT, self.pending_weights.popleft())

    def _add(self, kind: Kind, microbatch: int) -> None:
        self.held_bytes += float(self.change_bytes[KINDS.index(kind), microbatch])
        self.actions.append(Action(self.stage, kind, microbatch))
