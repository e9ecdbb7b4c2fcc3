"""Orders in which a stage, after a warm-up of forwards, does a backward and a forward in turn, with W some steps later.

What 1F1B, ZB-H1 and ZB-H2 have in common. A stage runs ahead of its backwards by its depth at most, by no more than
the stage before it, which could deadlock otherwise, and by no more than its worker's memory holds.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.plan.actions import Action, Kind
from planner.schedules.kernel.problem import GRACE, Floats, Orders, SchedulingProblem
from traces.common.errors import InputError


def take_turns(problem: SchedulingProblem, depths: Sequence[int], deferrals: Sequence[int] | None = None) -> Orders:
    """Return the orders of a pipeline with one stage a worker.

    Args:
        problem: The pipeline.
        depths: Forwards that a stage begins before its first backward, at most, [stages].
        deferrals: How many I come before the W of the first, at most, [stages]; None for B instead of I and W.

    Raises:
        InputError: A microbatch does not fit into a worker's memory.
    """
    capacity_bytes, reserve_bytes = problem.capacity_bytes * (1 + GRACE), problem.reserve_bytes
    recomputed_bytes = problem.recomputed_bytes
    rows: dict[int, list[Action]] = {}
    begun_before = [problem.microbatches] * problem.microbatches
    for stage, worker in enumerate(problem.workers):
        row = _Row(
            problem,
            stage,
            None if deferrals is None else deferrals[stage],
            recomputed_bytes[stage],
            float(capacity_bytes[worker]),
            float(capacity_bytes[worker] - reserve_bytes[worker]),
        )
        begun_before = row.fill(depths[stage], begun_before)
        rows[worker] = row.actions
    return Orders.from_actions(rows[worker] for worker in range(problem.worker_count))


@dataclass(slots=True)
class _Row:
    """The actions of one stage while they are put in order; forwards leave room for what a backward recomputes."""

    problem: SchedulingProblem
    stage: int
    deferral: int | None
    recomputed_bytes: Floats
    capacity_bytes: float
    forward_capacity_bytes: float
    actions: list[Action] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    held_bytes: float = 0.0
    begun: int = 0

    def fill(self, depth: int, begun_before: Sequence[int]) -> list[int]:
        """Add all actions; return how many forwards come before each backward, as ``begun_before`` says upstream."""
        begun = []
        for microbatch, limit in enumerate(begun_before):
            target = min(self.problem.microbatches, microbatch + max(depth, 1), limit)
            while self.begun < target and self._make_room(microbatch):
                self._add(Kind.FORWARD, self.begun)
                self.begun += 1
            begun.append(self.begun)
            self._backward(microbatch)
        self._weigh(0)
        return begun

    def _backward(self, microbatch: int) -> None:
        if self.deferral is None:
            self._add(Kind.BACKWARD, microbatch)
            return
        while self.waiting and self.held_bytes + self.recomputed_bytes[microbatch] > self.capacity_bytes:
            self._weigh(len(self.waiting) - 1)
        self._add(Kind.BACKWARD_INPUT, microbatch)
        self.waiting.append(microbatch)
        self._weigh(self.deferral)

    def _make_room(self, microbatch: int) -> bool:
        """Do W until the next forward fits, beside a backward; return False if it has to wait for a backward."""
        while self.held_bytes + self.problem.activation_bytes[self.stage, self.begun] > self.forward_capacity_bytes:
            if self.waiting:
                self._weigh(len(self.waiting) - 1)
            elif self.begun > microbatch:
                return False
            else:
                raise InputError(f"microbatch {microbatch} does not fit into the memory of stage {self.stage}")
        return True

    def _weigh(self, left: int) -> None:
        while len(self.waiting) > left:
            self._add(Kind.BACKWARD_WEIGHT, self.waiting.popleft())

    def _add(self, kind: Kind, microbatch: int) -> None:
        activation_bytes = float(self.problem.activation_bytes[self.stage, microbatch])
        weight_bytes = float(self.problem.weight_bytes[self.stage, microbatch])
        change_bytes = {
            Kind.FORWARD: activation_bytes,
            Kind.BACKWARD: -activation_bytes,
            Kind.BACKWARD_INPUT: weight_bytes - activation_bytes,
            Kind.BACKWARD_WEIGHT: -weight_bytes,
        }
        self.held_bytes += change_bytes[kind]
        self.actions.append(Action(self.stage, kind, microbatch))
