"""The dynamic order: a free worker chooses among the actions whose inputs have arrived, which absorbs jitter.

Actions are F (forward) and B (backward), or F, I (input gradient) and W (weight gradient). A free worker starts:

1. A ready I or B. If the activations that an I recomputes do not fit into memory, a ready W goes first.
2. Otherwise a ready F, if its stage has fewer than ``in_flight`` microbatches between the start of F and the end of I
   or B, and if there is enough memory: for this F, for one microbatch of every later stage of the worker, and for the
   activations that one backward recomputes. Earlier microbatches that the stage has not started count as in flight:
   replicas may get their inputs in different orders, and would else wait for each other without end.
3. Otherwise a ready W.

Among ready actions of one kind, the lowest microbatch goes first, and of several with the same microbatch the latest
stage. An input that arrives at the moment at which the worker becomes free counts as ready; transfers that are still on
their way are ignored. In simulated steps, and in evaluated ones on shared links, that moment lasts `SAME_MOMENT_S`.

`dynamic_orders` returns the orders that result if every action and transfer takes exactly the problem's time.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from planner.plan.actions import Action, Kind
from planner.schedules.kernel.arrays import first_actions, tables_of, to_orders
from planner.schedules.kernel.list_scheduling import Rules, list_schedule
from planner.schedules.kernel.problem import Orders, SchedulingProblem
from traces.common.errors import InputError

# Times of equal devices and messages are often equal. Computed along different ways they differ by rounding, which must
# not decide what a worker chooses: in whatever order devices are listed, it chooses the same.
SAME_MOMENT_S = 1e-9


def dynamic_orders(problem: SchedulingProblem, split: bool) -> Orders:
    """Return the orders that result from the module's rule at the problem's exact times.

    With ``split``, backwards are split into I and W; otherwise they are unsplit (B).

    Raises:
        InputError: A microbatch does not fit into a worker's memory.
    """
    stages, microbatches = problem.stages, problem.microbatches
    nothing = np.zeros(stages)
    rules = Rules(
        split,
        np.arange(microbatches),
        np.maximum(1, np.array(problem.in_flight, dtype=np.int64)),
        np.ones(stages, dtype=np.bool_),
        nothing,
        nothing,
        np.full(stages, microbatches + 1),
    )
    first = first_actions(problem, split)
    sequence = np.empty(int(first[-1]), dtype=np.int64)
    if list_schedule(tables_of(problem), rules, first, np.inf, sequence) == np.inf:
        raise no_room(problem)
    return to_orders(sequence, first)


def no_room(problem: SchedulingProblem) -> InputError:
    """Return the error that names the worker with the least room for one microbatch of each of its stages."""
    saved_bytes = np.bincount(problem.workers, problem.activation_bytes.max(axis=1), problem.worker_count)
    needs_bytes = saved_bytes + problem.reserve_bytes
    worker = int(np.argmax(needs_bytes / np.maximum(problem.capacity_bytes, 1e-300)))
    return InputError(
        f"worker {worker} has room for {problem.capacity_bytes[worker]:.0f} bytes of activations, but one microbatch "
        f"of each of its stages takes {needs_bytes[worker]:.0f} bytes",
        valid="take smaller microbatches or a device with more memory",
    )


_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


class DynamicChoice:
    """The remaining actions of one worker in one step, and the choice among the ready ones by the module's rule.

    Args:
        messages: Every action of the worker in the step, with the number of messages that the action waits for.
    """

    def __init__(self, problem: SchedulingProblem, worker: int, messages: Mapping[Action, int]) -> None:
        self._problem = problem
        self._worker = worker
        self._followers: defaultdict[Action, list[Action]] = defaultdict(list)
        self._missing = dict(messages)
        for action in messages:
            for other in _before(action):
                if other in messages:
                    self._followers[other].append(action)
                    self._missing[action] += 1
        self._ready = {action for action, count in self._missing.items() if not count}
        # The microbatches of each stage whose forward has not started, in order.
        self._unstarted: defaultdict[int, list[int]] = defaultdict(list)
        for action in sorted(messages, key=_rank):
            if action.kind is Kind.FORWARD:
                self._unstarted[action.stage].append(action.microbatch)
        self._live: defaultdict[int, int] = defaultdict(int)
        self._held_bytes = dict.fromkeys(problem.stages_of(worker), 0.0)
        self._largest_bytes = {stage: float(problem.activation_bytes[stage].max()) for stage in self._held_bytes}
        self._reserve_bytes = float(problem.reserve_bytes[worker])

    @property
    def remaining(self) -> int:
        """Number of actions of the step that have not finished."""
        return len(self._missing)

    def arrive(self, action: Action) -> None:
        """Record that one input of ``action`` is there: a message, or the result of an action of the same worker."""
        self._missing[action] -= 1
        if not self._missing[action]:
            self._ready.add(action)

    def best(self) -> Action | None:
        """Return the action that the module's rule starts next; None if no action may start now."""
        gradients = [action for action in self._ready if action.kind in _GRADIENTS]
        forwards = [action for action in self._ready if action.kind is Kind.FORWARD and self._allowed(action)]
        weights = [action for action in self._ready if action.kind is Kind.BACKWARD_WEIGHT]
        if gradients and weights and not self._has_room(min(gradients, key=_rank)):
            return min(weights, key=_rank)
        for choice in (gradients, forwards, weights):
            if choice:
                return min(choice, key=_rank)
        return None

    def start(self, action: Action) -> None:
        """Record the start of an action."""
        self._ready.discard(action)
        if action.kind is Kind.FORWARD:
            self._unstarted[action.stage].remove(action.microbatch)
            self._live[action.stage] += 1
            self._held_bytes[action.stage] += self._problem.activation_bytes[action.stage, action.microbatch]

    def finish(self, action: Action) -> None:
        """Record the end of an action; the actions that waited only for this action become ready."""
        stage, microbatch = action.stage, action.microbatch
        del self._missing[action]
        saved_bytes = float(self._problem.weight_bytes[stage, microbatch])
        if action.kind in _GRADIENTS:
            self._live[stage] -= 1
            staying_bytes = saved_bytes if action.kind is Kind.BACKWARD_INPUT else 0.0
            self._held_bytes[stage] -= self._problem.activation_bytes[stage, microbatch] - staying_bytes
        elif action.kind is Kind.BACKWARD_WEIGHT:
            self._held_bytes[stage] -= saved_bytes
        for follower in self._followers[action]:
            self.arrive(follower)

    def _allowed(self, action: Action) -> bool:
        """Return whether the stage's ``in_flight`` and the worker's memory allow a forward to start."""
        stage, unstarted = action.stage, self._unstarted[action.stage]
        earlier = unstarted[: bisect_left(unstarted, action.microbatch)]
        if self._live[stage] + len(earlier) >= self._problem.in_flight[stage]:
            return False
        room_bytes = float(self._problem.capacity_bytes[self._worker]) - self._reserve_bytes
        for other, largest_bytes in self._largest_bytes.items():
            room_bytes -= max(self._held_bytes[other], largest_bytes if other > stage else 0.0)
        room_bytes -= sum(float(self._problem.activation_bytes[stage, other]) for other in earlier)
        return bool(self._problem.activation_bytes[stage, action.microbatch] <= room_bytes)

    def _has_room(self, action: Action) -> bool:
        """Return whether the activations that an I recomputes fit into memory."""
        if not self._reserve_bytes:
            return True
        room_bytes = float(self._problem.capacity_bytes[self._worker]) - sum(self._held_bytes.values())
        return bool(self._problem.recomputed_bytes[action.stage, action.microbatch] <= room_bytes)


def _rank(action: Action) -> tuple[int, int]:
    return action.microbatch, -action.stage


def _before(action: Action) -> tuple[Action, ...]:
    """Return the actions whose outputs an action needs, of any worker; a returned stage may not exist."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return (Action(stage - 1, Kind.FORWARD, microbatch),)
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (Action(stage, Kind.BACKWARD_INPUT, microbatch),)
    return (Action(stage, Kind.FORWARD, microbatch), Action(stage + 1, action.kind, microbatch))
