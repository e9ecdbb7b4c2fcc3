"""Build the graph of a step from a plan's pipelines: workers, their orders of actions, and messages between them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from planner.plan.plan import Pipeline, Plan, Stage
from planner.schedules.kernel.problem import BACKWARD_WEIGHT, FORWARD, Orders
from planner.step.graph import Ints, StepGraph

# Role of an action by the stage that gets its result: forward (F) the next stage; input gradient and unsplit backward
# (I, B) the previous stage; weight gradient (W) none.
_FEEDS_NEXT, _FEEDS_PREVIOUS, _FEEDS_NOBODY = 0, 1, 2


class Workers(NamedTuple):
    """Workers of all pipelines and their orders of actions. Stage and worker numbers count over all pipelines.

    The orders of all workers are concatenated to one list of entries. An actor is one replica of a worker.

    Attributes:
        first_ordered: First entry of each worker in the next three arrays; last the number of entries, [workers + 1].
        kind: Kind of each action, a constant of `planner.schedules.kernel.problem`, [entries].
        stage: Stage of each action, [entries].
        microbatch: Index of each action's microbatch in its pipeline, [entries].
        first_actor: First actor of each worker; last the number of actors, [workers + 1].
        stage_worker: Worker that holds each stage, [stages].
        is_last: Whether a stage is the last one of its pipeline, [stages].
        first_bound: First entry of each stage in `bounds`, [stages].
        bounds: For each stage and microbatch, the first sample of each replica, followed by the number of samples of
            the microbatch; flat, [sum over stages of microbatches * (replicas + 1)].
        first_place: First entry of each stage in the table that `place_actions` returns; last the table's length,
            [stages + 1]. The table has three entries for each microbatch and replica: F; I or B; W.
    """

    first_ordered: Ints
    kind: NDArray[np.int8]
    stage: Ints
    microbatch: Ints
    first_actor: Ints
    stage_worker: Ints
    is_last: NDArray[np.bool_]
    first_bound: Ints
    bounds: Ints
    first_place: Ints


class Origins(NamedTuple):
    """For each action its entry in the orders of `Workers`, and for each message the actions that send and receive it.

    Attributes:
        ordered: Index in the arrays of `Workers` of each action, [actions].
        actor: Actor of each action, [actions].
        sender: Index of the action that sends each message, non-decreasing, [messages].
        receiver: Index of the action that waits for each message, [messages].
        start_sample: First sample that each message carries, [messages].
        stop_sample: Index after the last sample that each message carries, [messages].
    """

    ordered: Ints
    actor: Ints
    sender: Ints
    receiver: Ints
    start_sample: Ints
    stop_sample: Ints


@njit(cache=True)
def _role(kind: int) -> int:
    if kind == FORWARD:
        return _FEEDS_NEXT
    return _FEEDS_NOBODY if kind == BACKWARD_WEIGHT else _FEEDS_PREVIOUS


@njit(cache=True)
def _target(workers: Workers, stage: int, role: int) -> int:
    """Return the stage that receives an action's result; -1 if no stage of another worker does."""
    if role == _FEEDS_NOBODY:
        return -1
    if role == _FEEDS_NEXT:
        if workers.is_last[stage]:
            return -1
        other = stage + 1
    else:
        if stage == 0 or workers.is_last[stage - 1]:
            return -1
        other = stage - 1
    same_worker = workers.stage_worker[other] == workers.stage_worker[stage]
    return -1 if same_worker else other


@njit(cache=True)
def _bound(workers: Workers, stage: int, microbatch: int, replicas: int, replica: int) -> int:
    return int(workers.bounds[workers.first_bound[stage] + microbatch * (replicas + 1) + replica])


@njit(cache=True)
def _replicas(workers: Workers, stage: int) -> int:
    worker = workers.stage_worker[stage]
    return int(workers.first_actor[worker + 1] - workers.first_actor[worker])


@njit(cache=True)
def _place(workers: Workers, stage: int, microbatch: int, replicas: int, replica: int, role: int) -> int:
    return int(workers.first_place[stage] + (microbatch * replicas + replica) * 3 + role)


@njit(cache=True)
def place_actions(workers: Workers) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the actions with at least one sample, actor by actor.

    Returns:
        Four arrays: the first action of each actor, last the number of actions, [actors + 1]; the index in the orders
        of each action, [actions]; the actor of each action, [actions]; and a flat table of action indices by stage,
        microbatch, replica and role (see `Workers.first_place`), -1 for no action.
    """
    total = 0
    for worker in range(len(workers.first_actor) - 1):
        ordered = workers.first_ordered[worker + 1] - workers.first_ordered[worker]
        total += ordered * (workers.first_actor[worker + 1] - workers.first_actor[worker])
    first_action = np.zeros(workers.first_actor[-1] + 1, np.int64)
    entries = np.empty(total, np.int64)
    actors = np.empty(total, np.int64)
    table = np.full(workers.first_place[-1], -1, np.int64)
    count = 0
    for worker in range(len(workers.first_actor) - 1):
        replicas = workers.first_actor[worker + 1] - workers.first_actor[worker]
        for replica in range(replicas):
            actor = workers.first_actor[worker] + replica
            for entry in range(workers.first_ordered[worker], workers.first_ordered[worker + 1]):
                stage, microbatch = workers.stage[entry], workers.microbatch[entry]
                start = _bound(workers, stage, microbatch, replicas, replica)
                if start < _bound(workers, stage, microbatch, replicas, replica + 1):
                    role = _role(workers.kind[entry])
                    table[_place(workers, stage, microbatch, replicas, replica, role)] = count
                    entries[count] = entry
                    actors[count] = actor
                    count += 1
            first_action[actor + 1] = count
    return first_action, entries[:count], actors[:count], table


@njit(cache=True)
def trace_origins(workers: Workers) -> tuple[Ints, Origins]:
    """Return the first action of each actor, [actors + 1], and the origins of actions and messages.

    An action sends one message to each replica of the receiving stage that shares samples with it.
    """
    first_action, entries, actors, table = place_actions(workers)
    most = 0
    for entry in entries:
        target = _target(workers, workers.stage[entry], _role(workers.kind[entry]))
        most += _replicas(workers, target) if target >= 0 else 0
    sender = np.empty(most, np.int64)
    receiver = np.empty(most, np.int64)
    start_sample = np.empty(most, np.int64)
    stop_sample = np.empty(most, np.int64)
    messages = 0
    for action in range(len(entries)):
        stage, microbatch = workers.stage[entries[action]], workers.microbatch[entries[action]]
        role = _role(workers.kind[entries[action]])
        target = _target(workers, stage, role)
        if target < 0:
            continue
        own_replicas, replicas = _replicas(workers, stage), _replicas(workers, target)
        replica = actors[action] - workers.first_actor[workers.stage_worker[stage]]
        start = _bound(workers, stage, microbatch, own_replicas, replica)
        end = _bound(workers, stage, microbatch, own_replicas, replica + 1)
        for other in range(replicas):
            first = max(start, _bound(workers, target, microbatch, replicas, other))
            after = min(end, _bound(workers, target, microbatch, replicas, other + 1))
            if first < after:
                sender[messages] = action
                receiver[messages] = table[_place(workers, target, microbatch, replicas, other, role)]
                start_sample[messages], stop_sample[messages] = first, after
                messages += 1
    return first_action, Origins(
        entries, actors, sender[:messages], receiver[:messages], start_sample[:messages], stop_sample[:messages]
    )


@njit(cache=True)
def connect(first_action: Ints, actors: Ints, sender: Ints, receiver: Ints) -> StepGraph:
    """Return the graph of actions and messages.

    ``first_action`` is as in `StepGraph`; ``actors``, ``sender`` and ``receiver`` are as in `Origins`.
    """
    first_received, received = group_by(receiver, len(actors))
    first_sent, _ = group_by(sender, len(actors))
    channel, channel_sender, channel_receiver = number_channels(actors, sender, actors[receiver])
    return StepGraph(
        first_action, first_received, received, first_sent, actors[receiver], channel, channel_sender, channel_receiver
    )


@njit(cache=True)
def group_by(keys: Ints, count: int) -> tuple[Ints, Ints]:
    """Return a stable grouping of the indices of ``keys`` by key.

    Returns:
        The position of each key's first index, last the number of keys, [count + 1]; and the grouped indices, [keys].
    """
    first = np.zeros(count + 1, np.int64)
    for key in keys:
        first[key + 1] += 1
    first = np.cumsum(first)
    fill = first[:-1].copy()
    grouped = np.empty(len(keys), np.int64)
    for entry in range(len(keys)):
        grouped[fill[keys[entry]]] = entry
        fill[keys[entry]] += 1
    return first, grouped


@njit(cache=True)
def number_channels(actors: Ints, sender: Ints, receiver: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the channel of each message, numbered in the order of first use, and each channel's two actors."""
    count = 0
    # The channels of each sending actor form a linked list, which is short, since an actor sends to few other actors.
    newest = np.full(actors.max() + 1 if len(actors) else 0, -1, np.int64)
    older = np.empty(len(sender), np.int64)
    channel_sender = np.empty(len(sender), np.int64)
    channel_receiver = np.empty(len(sender), np.int64)
    channel = np.empty(len(sender), np.int64)
    for message in range(len(sender)):
        source, target = actors[sender[message]], receiver[message]
        found = newest[source]
        while found >= 0 and channel_receiver[found] != target:
            found = older[found]
        if found < 0:
            found = count
            channel_sender[found], channel_receiver[found] = source, target
            older[found] = newest[source]
            newest[source] = found
            count += 1
        channel[message] = found
    return channel, channel_sender[:count].copy(), channel_receiver[:count].copy()


def plan_workers(plan: Plan, orders: Sequence[Orders]) -> Workers:
    """Return the workers of all pipelines of a plan that passes `planner.check`, given each pipeline's orders."""
    stages = [(pipeline, stage) for pipeline in plan.pipelines for stage in pipeline.stages]
    first_stage = starts(len(pipeline.stages) for pipeline in plan.pipelines)
    first_worker = starts(max(pipeline.workers) + 1 for pipeline in plan.pipelines)
    stage_worker = np.concatenate(
        [np.array(each.workers) + first for each, first in zip(plan.pipelines, first_worker, strict=False)]
    )
    _, first_stage_held = np.unique(stage_worker, return_index=True)
    is_last = np.zeros(len(stages), np.bool_)
    is_last[first_stage[1:] - 1] = True
    bounds = [_bounds(pipeline, stage) for pipeline, stage in stages]
    return Workers(
        starts(int(count) for each in orders for count in np.diff(each.first_action)),
        np.concatenate([each.kind for each in orders]),
        np.concatenate([each.stage + first for each, first in zip(orders, first_stage, strict=False)]),
        np.concatenate([each.microbatch for each in orders]).astype(np.int64),
        starts(len(stages[index][1].replicas) for index in first_stage_held),
        stage_worker,
        is_last,
        starts(len(each) for each in bounds)[:-1],
        np.concatenate(bounds),
        starts(3 * len(pipeline.microbatches) * len(stage.replicas) for pipeline, stage in stages),
    )


def starts(counts: Iterable[int]) -> Ints:
    """Return the start of each of consecutive parts of these lengths, and at last the end of all, [counts + 1]."""
    return np.cumsum([0, *counts], dtype=np.int64)


def _bounds(pipeline: Pipeline, stage: Stage) -> Ints:
    """Return the stage's part of `Workers.bounds`."""
    sizes, which = np.unique(np.array(pipeline.microbatches), return_inverse=True)
    rows = [[0, *(end for _, end in stage.intervals(int(size)))] for size in sizes]
    return np.array(rows, np.int64)[which].ravel()
