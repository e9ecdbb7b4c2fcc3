"""The scheduling problem of one pipeline, the orders of its workers' actions, and the check of orders against limits.

Actions are F (forward), B (unsplit backward), I (input gradient) and W (weight gradient); I and W are the two halves of
a B.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.plan.actions import Action, Kind
from traces.common.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Relative tolerance of comparisons with byte limits: sums of floats depend on the order of summation.
GRACE = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class SchedulingProblem:
    """One training step of one pipeline, whose actions a schedule puts in order.

    A worker runs its actions in order, one at a time. F of stage s needs the output of F of stage s - 1; I (or B) of
    stage s needs the gradient of I (or B) of stage s + 1 and its own F; W needs its own I. A transfer is sent when the
    action that made it ends. The channel from one worker to another carries the activations and gradients of all their
    stages one at a time, first come, first served: a transfer occupies the channel for its transmission time and
    arrives one latency later, but never before the preceding transfer. Between stages of one worker, transfers take no
    time. B takes as long as I and W together, and sends its gradient at its end.

    Attributes:
        workers: Number of the worker that holds each stage, [stages]; the replicas of a stage count as one worker,
            since they share one order.
        in_flight: Limit on the microbatches of a stage between the start of F and the end of I or B, [stages]. The plan
            gives it, and every schedule except ``gpipe`` respects it.
        forward_s: Seconds of F, [stages, microbatches].
        backward_input_s: Seconds of I, [stages, microbatches].
        backward_weight_s: Seconds of W, [stages, microbatches].
        forward_transmission_s: Seconds for which an activation occupies the channel from stage s to s + 1,
            [stages - 1, microbatches].
        backward_transmission_s: Seconds for which a gradient occupies the channel from stage s + 1 to s,
            [stages - 1, microbatches].
        forward_latency_s: Propagation seconds from stage s to s + 1, [stages - 1].
        backward_latency_s: Propagation seconds from stage s + 1 to s, [stages - 1].
        activation_bytes: Bytes held from the start of F until the end of I or B, [stages, microbatches].
        weight_bytes: Bytes held from the end of I until the end of W, [stages, microbatches]. If they exceed
            ``activation_bytes``, because the stage recomputes or keeps gradients of many outputs, they count from the
            start of I or B on.
        capacity_bytes: Bytes of memory available for activations, [workers]; may be infinite.
    """

    workers: tuple[int, ...]
    in_flight: tuple[int, ...]
    forward_s: Floats
    backward_input_s: Floats
    backward_weight_s: Floats
    forward_transmission_s: Floats
    backward_transmission_s: Floats
    forward_latency_s: Floats
    backward_latency_s: Floats
    activation_bytes: Floats
    weight_bytes: Floats
    capacity_bytes: Floats

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SchedulingProblem) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[object, ...]:
        columns = (getattr(self, column.name) for column in fields(self))
        return tuple(each.tobytes() if isinstance(each, np.ndarray) else each for each in columns)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.workers)

    @property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return int(self.forward_s.shape[1])

    @property
    def worker_count(self) -> int:
        """Number of workers."""
        return max(self.workers) + 1

    @property
    def has_equal_microbatches(self) -> bool:
        """Whether all microbatches take the same times and bytes."""
        tables = (
            self.forward_s,
            self.backward_input_s,
            self.backward_weight_s,
            self.forward_transmission_s,
            self.backward_transmission_s,
            self.activation_bytes,
            self.weight_bytes,
        )
        return all(bool(np.all(table == table[:, :1])) for table in tables)

    @property
    def recomputed_bytes(self) -> Floats:
        """Bytes that I or B takes from its start on in addition to ``activation_bytes``, [stages, microbatches]."""
        return np.maximum(self.weight_bytes - self.activation_bytes, 0.0)

    @property
    def reserve_bytes(self) -> Floats:
        """Largest `recomputed_bytes` of any backward, [workers]; forwards must leave these bytes free."""
        reserve = np.zeros(self.worker_count)
        np.maximum.at(reserve, np.array(self.workers), self.recomputed_bytes.max(axis=1, initial=0.0))
        return reserve

    @property
    def change_bytes(self) -> Floats:
        """Bytes by which an action changes the memory of its worker, [4 kinds as in `KINDS`, stages, microbatches]."""
        activations, weights = self.activation_bytes, self.weight_bytes
        return np.stack([activations, -activations, weights - activations, -weights])

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the indices of the stages that a worker holds, rising."""
        return tuple(stage for stage, holder in enumerate(self.workers) if holder == worker)

    def between_workers(self) -> tuple[bool, ...]:
        """Return, for each stage s but the last, whether stages s and s + 1 are on different workers."""
        return tuple(left != right for left, right in pairwise(self.workers))


# Arrays hold a kind of action as its index in this tuple.
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)


@dataclass(frozen=True, eq=False, slots=True)
class Orders:
    """The actions of all workers, worker by worker, each in the order in which the worker runs them.

    Attributes:
        first_action: Index of each worker's first action, then the number of all actions; int64 [workers + 1].
        kind: Number of the kind: 0 is F, 1 is B, 2 is I, 3 is W; int8 [actions].
        stage: Index of the action's stage; int32 [actions].
        microbatch: Index of the action's microbatch; int32 [actions].
    """

    first_action: NDArray[np.int64]
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]

    @classmethod
    def from_actions(cls, rows: Iterable[Sequence[Action]]) -> "Orders":
        """Return the orders with one row of actions per worker."""
        listed = [tuple(row) for row in rows]
        actions = [action for row in listed for action in row]
        return cls(
            np.cumsum([0, *map(len, listed)], dtype=np.int64),
            np.array([KINDS.index(action.kind) for action in actions], dtype=np.int8),
            np.array([action.stage for action in actions], dtype=np.int32),
            np.array([action.microbatch for action in actions], dtype=np.int32),
        )

    @property
    def worker_count(self) -> int:
        """Number of workers."""
        return len(self.first_action) - 1

    def actions(self, worker: int) -> tuple[Action, ...]:
        """Return one worker's actions in order."""
        own = slice(int(self.first_action[worker]), int(self.first_action[worker + 1]))
        columns = zip(self.stage[own].tolist(), self.kind[own].tolist(), self.microbatch[own].tolist(), strict=True)
        return tuple(Action(stage, KINDS[kind], microbatch) for stage, kind, microbatch in columns)


def peak_bytes(problem: SchedulingProblem, orders: Orders) -> Floats:
    """Return the most bytes of activations that each worker holds at once, [workers]."""
    change_bytes = problem.change_bytes[orders.kind, orders.stage, orders.microbatch]
    # B holds recomputed activations only while it runs; after an I, they are part of `weight_bytes`.
    during_bytes = (problem.activation_bytes + problem.recomputed_bytes)[orders.stage, orders.microbatch]
    within_bytes = np.where(orders.kind == BACKWARD, during_bytes, 0.0)
    rows = zip(*(np.split(each, orders.first_action[1:-1]) for each in (change_bytes, within_bytes)), strict=True)
    return np.array([(np.cumsum(change) + within).max(initial=0.0) for change, within in rows])


def peak_live(problem: SchedulingProblem, orders: Orders) -> Ints:
    """Return the most microbatches that each stage holds between the start of F and the end of I or B, [stages]."""
    change = np.where(orders.kind == FORWARD, 1, np.where(orders.kind == BACKWARD_WEIGHT, 0, -1))
    return np.array([np.cumsum(change[orders.stage == stage]).max() for stage in range(problem.stages)])


def is_within_limits(problem: SchedulingProblem, orders: Orders) -> bool:
    """Return whether orders respect every worker's memory and every stage's ``in_flight``."""
    fits = np.all(peak_bytes(problem, orders) <= problem.capacity_bytes * (1 + GRACE))
    return bool(fits and np.all(peak_live(problem, orders) <= np.array(problem.in_flight)))


def is_looped(workers: tuple[int, ...]) -> bool:
    """Return whether stages lie on P workers in turn, so that one worker holds stages 0, P, 2P, ..."""
    count = len(set(workers))
    return len(workers) % count == 0 and all(holder == workers[stage % count] for stage, holder in enumerate(workers))


def is_v_shaped(workers: tuple[int, ...]) -> bool:
    """Return whether 2P stages lie on P workers so that the worker of stage s also holds stage 2P - 1 - s."""
    return len(workers) == 2 * len(set(workers)) and workers == workers[::-1]


def require_straight(problem: SchedulingProblem, name: str) -> None:
    """Raise an error if a worker holds several stages.

    Raises:
        InputError: A worker holds several stages; schedule ``name`` does not define their order.
    """
    if len(set(problem.workers)) < problem.stages:
        raise InputError(
            f"the pipeline has {problem.stages} stages on {problem.worker_count} workers",
            where=f"schedule '{name}'",
            valid="place one stage on each worker, or take schedule interleaved-1f1b, zb-v, compact-zb or portfolio",
        )
