"""What a scheduler knows of one pipeline: durations, transfers, memory, and which worker holds which stage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.plan.actions import Action, Kind
from traces.common.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Bytes and limits are compared with this relative tolerance, for sums of floats in another order.
GRACE = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class SchedulingProblem:
    """One step of one pipeline, to be put in order.

    A worker runs its actions in order, one at a time. F of stage s needs the output of F of stage s - 1, I (or B) of
    stage s the gradient of I (or B) of stage s + 1 and its own F, W its own I. A transfer is handed over when the
    action that made it ends. The channel from one worker to another carries the activations and gradients of all
    their stages one at a time, first come, first served: each keeps it busy for its occupancy and arrives one latency
    later, or with one before it that arrives later. Between stages of one worker nothing takes time. B is I and W in
    one action; its gradient leaves at its end.

    Attributes:
        workers: Stage to the worker that holds it; a worker is the replicas that share one order.
        in_flight: Stage to the most microbatches that it may hold between the start of F and the end of I or B,
            chosen by the plan; a schedule says whether it heeds them.
        forward_s: Seconds of F, [stages, microbatches].
        backward_input_s: Seconds of I, [stages, microbatches].
        backward_weight_s: Seconds of W, [stages, microbatches].
        forward_occupancy_s: Seconds for which an activation keeps the channel from stage s to s + 1 busy,
            [stages - 1, microbatches].
        backward_occupancy_s: Seconds for which a gradient keeps the channel from stage s + 1 to s busy,
            [stages - 1, microbatches].
        forward_latency_s: Seconds on the way from stage s to s + 1, [stages - 1].
        backward_latency_s: Seconds on the way from stage s + 1 to s, [stages - 1].
        activation_bytes: Bytes held from the start of F until the end of I or B, [stages, microbatches].
        weight_bytes: Bytes held from then until the end of W, [stages, microbatches]. Where they are more than those,
            since the stage recomputes, they are there from the start of I or B on: B holds them while it runs.
        capacity_bytes: Bytes that activations may fill, [workers]; may be infinite.
    """

    workers: tuple[int, ...]
    in_flight: tuple[int, ...]
    forward_s: Floats
    backward_input_s: Floats
    backward_weight_s: Floats
    forward_occupancy_s: Floats
    backward_occupancy_s: Floats
    forward_latency_s: Floats
    backward_latency_s: Floats
    activation_bytes: Floats
    weight_bytes: Floats
    capacity_bytes: Floats

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
    def has_alike_microbatches(self) -> bool:
        """Whether all microbatches take the same times and bytes."""
        tables = (
            self.forward_s,
            self.backward_input_s,
            self.backward_weight_s,
            self.forward_occupancy_s,
            self.backward_occupancy_s,
            self.activation_bytes,
            self.weight_bytes,
        )
        return all(bool(np.all(table == table[:, :1])) for table in tables)

    @property
    def recomputed_bytes(self) -> Floats:
        """Bytes that I or B takes when it starts, beyond those that are held for it, [stages, microbatches]."""
        return np.maximum(self.weight_bytes - self.activation_bytes, 0.0)

    @property
    def reserve_bytes(self) -> Floats:
        """What the backward that recomputes the most takes, [workers]; forwards leave it free."""
        reserve = np.zeros(self.worker_count)
        np.maximum.at(reserve, np.array(self.workers), self.recomputed_bytes.max(axis=1, initial=0.0))
        return reserve

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages that a worker holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.workers) if holder == worker)

    def crossings(self) -> tuple[bool, ...]:
        """Return for each boundary between stages s and s + 1 whether it lies between two workers."""
        return tuple(left != right for left, right in pairwise(self.workers))


# The number of a kind is its place here.
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)

_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True, eq=False, slots=True)
class Orders:
    """The actions of all workers, one worker after the other, each worker's in the order in which it does them.

    Attributes:
        first_action: Where each worker's actions begin, and after the last one the number of all, int64 [workers + 1].
        kind: Number of the kind: 0 is F, 1 is B, 2 is I, 3 is W; int8 [actions].
        stage: int32 [actions].
        microbatch: int32 [actions].
    """

    first_action: NDArray[np.int64]
    kind: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]

    @classmethod
    def from_actions(cls, rows: Iterable[Sequence[Action]]) -> "Orders":
        """Return the orders that the rows say, one row per worker."""
        listed = [tuple(row) for row in rows]
        every = [action for row in listed for action in row]
        return cls(
            np.cumsum([0, *map(len, listed)], dtype=np.int64),
            np.array([_NUMBERS[action.kind] for action in every], dtype=np.int8),
            np.array([action.stage for action in every], dtype=np.int32),
            np.array([action.microbatch for action in every], dtype=np.int32),
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
    activation_bytes = problem.activation_bytes[orders.stage, orders.microbatch]
    weight_bytes = problem.weight_bytes[orders.stage, orders.microbatch]
    change_bytes = np.where(orders.kind == FORWARD, activation_bytes, -activation_bytes)
    change_bytes = np.where(orders.kind == BACKWARD_INPUT, weight_bytes - activation_bytes, change_bytes)
    change_bytes = np.where(orders.kind == BACKWARD_WEIGHT, -weight_bytes, change_bytes)
    # What B recomputes comes and goes with it; of I it is among the weight's bytes.
    recomputed_bytes = problem.recomputed_bytes[orders.stage, orders.microbatch]
    within_bytes = np.where(orders.kind == BACKWARD, activation_bytes + recomputed_bytes, 0.0)
    rows = zip(*(np.split(each, orders.first_action[1:-1]) for each in (change_bytes, within_bytes)), strict=True)
    return np.array([(np.cumsum(change) + within).max(initial=0.0) for change, within in rows])


def peak_live(problem: SchedulingProblem, orders: Orders) -> Ints:
    """Return the most microbatches that each stage holds between the start of F and the end of I or B, [stages]."""
    change = np.where(orders.kind == FORWARD, 1, np.where(orders.kind == BACKWARD_WEIGHT, 0, -1))
    return np.array([np.cumsum(change[orders.stage == stage]).max() for stage in range(problem.stages)])


def is_within_limits(problem: SchedulingProblem, orders: Orders) -> bool:
    """Whether orders keep within every worker's memory and every stage's ``in_flight``."""
    fits = np.all(peak_bytes(problem, orders) <= problem.capacity_bytes * (1 + GRACE))
    return bool(fits and np.all(peak_live(problem, orders) <= np.array(problem.in_flight)))


def is_straight(workers: tuple[int, ...]) -> bool:
    """Whether every worker holds one stage."""
    return len(set(workers)) == len(workers)


def is_looped(workers: tuple[int, ...]) -> bool:
    """Whether stages go round the workers in turn, so that worker 0 of P holds stages 0, P, 2P, ..."""
    count = len(set(workers))
    return len(workers) % count == 0 and all(holder == workers[stage % count] for stage, holder in enumerate(workers))


def is_v_shaped(workers: tuple[int, ...]) -> bool:
    """Whether the worker of stage s holds stage 2P - 1 - s too, of 2P stages on P workers."""
    return len(workers) == 2 * len(set(workers)) and workers == workers[::-1]


def require_straight(problem: SchedulingProblem, name: str) -> None:
    """Refuse a pipeline whose workers hold several stages.

    Raises:
        InputError: A worker does, so schedule ``name`` says nothing about its order.
    """
    if not is_straight(problem.workers):
        raise InputError(
            f"{problem.stages} stages on {problem.worker_count} workers",
            where=f"schedule '{name}'",
            valid="it orders one stage a worker; take interleaved-1f1b, zb-v, compact-zb or portfolio",
        )
