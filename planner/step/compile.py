"""Compile one step of a plan to arrays: its graph, and a description of each action and message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from planner.cost.device_transport import copy_seconds_per_byte
from planner.cost.layers import with_launches
from planner.cost.network import wire_bytes
from planner.cost.stage import distinct_sizes, stage_times
from planner.cost.synchronisation import gradient_syncs
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.problem import FORWARD
from planner.step.build import Origins, Workers, connect, plan_workers, starts, trace_origins
from planner.step.graph import Floats, Ints, StepGraph
from planner.step.orders import plan_orders
from planner.step.sync import (
    SyncSpan,
    communication_streams,
    ready_buckets,
    split_actions,
    stream_actions,
    sync_actions,
)
from planner.step.tables import SYNC, UPDATE, Actions, Messages, append, join_actions


@dataclass(frozen=True, eq=False, slots=True)
class CompiledStep:
    """One step of a plan in arrays.

    An actor is a device, or a tensor-parallel group, which has the name of its first device. If sums of gradients
    overlap with backward, communication streams are actors too (`planner.step.sync`).

    Attributes:
        actors: Device name of each actor, in rank order, followed by the device name of each communication stream.
        pipeline: Index of each actor's pipeline, [actors].
        stage: Index of the first stage that each actor holds, [actors].
        graph: Order of actions, and the messages between them.
        actions: Description of each action, in the graph's order.
        messages: Description of each message, in the graph's order.
        spans: Ranges of the actions of each sum of gradients, sorted by actor and position.
    """

    actors: tuple[str, ...]
    pipeline: Ints
    stage: Ints
    graph: StepGraph
    actions: Actions
    messages: Messages
    spans: tuple[SyncSpan, ...]


@lru_cache(maxsize=32)
def compile_step(plan: Plan, scenario: Scenario) -> CompiledStep:
    """Return one step of a plan that passes `planner.check.check_plan` for the scenario.

    Results are cached, because every step of a run compiles its plan, and a policy compiles its candidates every step.
    """
    workers = plan_workers(plan, plan_orders(plan, scenario))
    _, origins = trace_origins(workers)
    places = _places(plan)
    actors = tuple(places)
    computed = _actions(plan, scenario, workers, origins)
    transfers = _messages(plan, scenario, workers, origins, actors)
    syncs = gradient_syncs(plan, scenario)
    devices = list(range(len(actors)))
    if plan.synchronisation.bucket_bytes:
        buckets = ready_buckets(syncs, computed, actors, plan, scenario)
        computed, first_segment = split_actions(computed, buckets)
        transfers = transfers.between(first_segment[1:] - 1, first_segment)
        streams = communication_streams(buckets, len(actors))
        sums, exchanged, spans = stream_actions(syncs, buckets, streams, actors, first_segment)
        devices += streams
    else:
        sums, exchanged, spans = sync_actions(syncs, {name: actor for actor, name in enumerate(actors)})
        exchanged = exchanged.later(len(computed.actor))
    later = join_actions(sums, _updates(plan, scenario, places))
    actions, messages, numbers = append(computed, transfers, later, exchanged)
    first_action = starts(np.bincount(actions.actor, minlength=len(devices)).tolist())
    return CompiledStep(
        tuple(actors[actor] for actor in devices),
        np.array([pipeline for pipeline, _ in places.values()], np.int64)[devices],
        np.array([stage for _, stage in places.values()], np.int64)[devices],
        connect(first_action, actions.actor, messages.sender, messages.receiver),
        actions,
        messages,
        tuple(span.moved(numbers) for span in spans),
    )


@lru_cache(maxsize=32)
def planned_compute_s(plan: Plan, scenario: Scenario) -> Mapping[str, float]:
    """Return the profiled compute seconds of a step for each device, including the optimizer's update.

    A tensor-parallel group is listed under its first device; all its devices compute equally long.
    """
    step = compile_step(plan.without_overlap, scenario)
    kinds, durations_s = step.actions.kind.tolist(), step.actions.duration_s.tolist()
    planned_s = {}
    for actor, device in enumerate(step.actors):
        own = range(*step.graph.first_action[actor : actor + 2].tolist())
        update_s = sum(durations_s[action] for action in own if kinds[action] == UPDATE)
        planned_s[device] = update_s + sum(durations_s[action] for action in own if kinds[action] < SYNC)
    return MappingProxyType(planned_s)


def _places(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return the pipeline and the first stage of each device, in rank order."""
    places: dict[str, tuple[int, int]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        for index, stage in enumerate(pipeline.stages):
            for replica in stage.replicas:
                places.setdefault(replica.device, (number, index))
    return places


def _actions(plan: Plan, scenario: Scenario, workers: Workers, origins: Origins) -> Actions:
    stage = workers.stage[origins.ordered]
    microbatch = workers.microbatch[origins.ordered]
    kind = workers.kind[origins.ordered]
    worker = workers.stage_worker[stage]
    replica = origins.actor - workers.first_actor[worker]
    replicas = np.diff(workers.first_actor)[worker]
    bound = workers.first_bound[stage] + microbatch * (replicas + 1) + replica
    # For each microbatch and replica of a stage, `Workers.first_place` counts three entries; `_durations_s` has a row.
    cell = workers.first_place[stage] // 3 + microbatch * replicas + replica
    first_stage = starts(len(pipeline.stages) for pipeline in plan.pipelines)
    pipeline = np.searchsorted(first_stage, stage, side="right") - 1
    return Actions(
        origins.actor,
        kind,
        pipeline,
        stage - first_stage[pipeline],
        microbatch,
        workers.bounds[bound],
        workers.bounds[bound + 1],
        _durations_s(plan, scenario)[cell, kind],
    )


def _updates(plan: Plan, scenario: Scenario, places: Mapping[str, tuple[int, int]]) -> Actions:
    """Return one optimizer update for each actor whose layers have a profiled time of the update."""
    update_s = dict.fromkeys(places, 0.0)
    for stage in plan.stages:
        for replica in stage.replicas:
            kind = scenario.cluster.by_name[replica.device].kind
            model = scenario.model.at_degree(replica.tensor_parallel)
            update_s[replica.device] += model.update_s(stage.first_layer, stage.end_layer, kind)
    rows = [(actor, place, update_s[name]) for actor, (name, place) in enumerate(places.items()) if update_s[name] > 0]
    none = np.zeros(len(rows), np.int64)
    return Actions(
        np.array([actor for actor, _, _ in rows], np.int64),
        np.full(len(rows), UPDATE, np.int8),
        np.array([pipeline for _, (pipeline, _), _ in rows], np.int64),
        np.array([stage for _, (_, stage), _ in rows], np.int64),
        np.full(len(rows), -1, np.int64),
        none,
        none,
        np.array([seconds for _, _, seconds in rows], np.float64),
    )


def _durations_s(plan: Plan, scenario: Scenario) -> Floats:
    """Return the seconds of F, B, I and W, [rows, 4], with a row for each stage, microbatch and replica, in this order.

    F is the forward, B the unsplit backward, I the input gradient and W the weight gradient.
    """
    rows = []
    for pipeline in plan.pipelines:
        sizes, which = distinct_sizes(pipeline.microbatches)
        for index, stage in enumerate(pipeline.stages):
            times = [
                with_launches(stage_times(scenario, pipeline, index, replica, stop - start), scenario)
                for size in sizes
                for replica, (start, stop) in zip(stage.replicas, stage.intervals(size), strict=True)
            ]
            table = np.array(
                [[each.forward_s, each.backward_s, each.backward_input_s, each.backward_weight_s] for each in times]
            )
            rows.append(table.reshape(len(sizes), -1, 4)[which].reshape(-1, 4))
    return np.concatenate(rows)


def _messages(plan: Plan, scenario: Scenario, workers: Workers, origins: Origins, actors: Sequence[str]) -> Messages:
    entry = origins.ordered[origins.sender]
    # The gradient that a stage sends has the size of the previous stage's output.
    boundary = workers.stage[entry] - (workers.kind[entry] != FORWARD)
    output_bytes = [scenario.model.layers[stage.end_layer - 1].output_bytes for stage in plan.stages]
    regions = [scenario.cluster.by_name[name].region for name in actors]
    region = np.array([scenario.cluster.regions.index(name) for name in regions], np.int64)[origins.actor]
    crosses = (region[origins.sender] != region[origins.receiver]).astype(np.int64)
    # The bytes of a transfer are proportional to its samples.
    number_bytes = scenario.training.formats.number_bytes
    forms = [[wire_bytes(form, 1, size, number_bytes) for size in output_bytes] for form in ("none", plan.compression)]
    size_bytes = (origins.stop_sample - origins.start_sample) * np.array(forms, np.int64)[crosses, boundary]
    copies_s = _copies_s(plan, scenario, actors, origins, size_bytes)
    # The first device of a tensor-parallel group sends what passes between stages, whole.
    ends = (origins.sender, origins.receiver, size_bytes, np.ones_like(size_bytes))
    return Messages(*ends, origins.start_sample, origins.stop_sample, *copies_s)


def _copies_s(
    plan: Plan, scenario: Scenario, actors: Sequence[str], origins: Origins, size_bytes: Ints
) -> tuple[Floats, Floats]:
    """Return how long each message is copied to its sender's host, and from its receiver's, seconds, [messages]."""
    out_s, in_s = np.zeros(len(size_bytes)), np.zeros(len(size_bytes))
    if not scenario.effects.transport.copies:
        return out_s, in_s
    ends = np.stack([origins.actor[origins.sender], origins.actor[origins.receiver]])
    pairs, which = np.unique(ends, axis=1, return_inverse=True)
    for number, (sender, receiver) in enumerate(pairs.T.tolist()):
        own = which.reshape(-1) == number
        each_s = copy_seconds_per_byte(plan, scenario, actors[sender], actors[receiver])
        out_s[own], in_s[own] = (size_bytes[own] * per_byte_s for per_byte_s in each_s)
    return out_s, in_s


# Cached, because a run records the same compiled step many times.
@lru_cache(maxsize=32)
def first_segments(compiled: CompiledStep) -> Ints:
    """Return, for each action segment, the first segment of its action, [actions].

    An action is split into segments where a gradient bucket becomes ready.
    """
    actions = compiled.actions
    identity = np.stack([actions.actor, actions.kind, actions.pipeline, actions.stage, actions.microbatch])
    begins = np.append(True, (identity[:, 1:] != identity[:, :-1]).any(axis=0))
    return np.maximum.accumulate(np.where(begins, np.arange(len(begins)), 0))


@lru_cache(maxsize=32)
def compute_numbers(compiled: CompiledStep) -> Ints:
    """Return, for each action segment, the number of its action among the actions of the step that compute, [actions].

    A gradient sum gets the number of the action before it, or 0.
    """
    segments = np.arange(len(compiled.actions.kind))
    begins = (first_segments(compiled) == segments) & (compiled.actions.kind != SYNC)
    numbers: Ints = np.maximum(np.cumsum(begins) - 1, 0)
    return numbers
