"""The makespan of an order of actions, as the longest path through its graph: the judge of schedules."""

from typing import NamedTuple

import numpy as np

from planner.schedules.kernel.problem import FORWARD, Orders, SchedulingProblem
from planner.step.build import Origins, Workers, connect, trace_origins
from planner.step.graph import Flags, Floats, Ints, StepGraph, longest_path, walk
from traces.common.errors import InputError


class PreparedOrders(NamedTuple):
    """Orders whose graph is built: scored again and again with other times.

    Attributes:
        graph: The graph of one pipeline, an actor per worker.
        origins: Where its parts come from.
        sequence: The actions, each after what it waits for.
        acting: The actors of these actions.
    """

    graph: StepGraph
    origins: Origins
    sequence: Ints
    acting: Ints


def prepare(problem: SchedulingProblem, orders: Orders) -> PreparedOrders:
    """Build the graph of the orders.

    Raises:
        InputError: The actions wait for each other in a cycle.
    """
    first_action, origins = trace_origins(_workers(problem, orders))
    graph = connect(first_action, origins.actor, origins.sender, origins.receiver)
    sequence, acting, position = walk(graph)
    if len(sequence) < graph.actions:
        actor = int(np.flatnonzero(position < graph.first_action[1:])[0])
        stuck = orders.actions(actor)[int(position[actor] - graph.first_action[actor])]
        raise InputError(f"the order of actions deadlocks: worker {actor} never gets what {stuck} needs")
    return PreparedOrders(graph, origins, sequence, acting)


def times_of(
    problem: SchedulingProblem, orders: Orders, prepared: PreparedOrders
) -> tuple[Floats, Floats, Floats, Flags]:
    """Return duration [actions], occupancy and latency [messages], in seconds, and that no message blocks."""
    kind, stage = orders.kind[prepared.origins.ordered], orders.stage[prepared.origins.ordered]
    microbatch = orders.microbatch[prepared.origins.ordered]
    whole_s = problem.backward_input_s + problem.backward_weight_s
    table_s = np.stack([problem.forward_s, whole_s, problem.backward_input_s, problem.backward_weight_s])
    duration_s = table_s[kind, stage, microbatch]
    if not len(prepared.origins.sender):
        nothing = np.empty(0)
        return duration_s, nothing, nothing, np.zeros(0, np.bool_)
    sender = prepared.origins.sender
    forward = kind[sender] == FORWARD
    boundary = stage[sender] - ~forward
    carried = microbatch[sender]
    transmission_s = np.where(
        forward, problem.forward_transmission_s[boundary, carried], problem.backward_transmission_s[boundary, carried]
    )
    latency_s = np.where(forward, problem.forward_latency_s[boundary], problem.backward_latency_s[boundary])
    return duration_s, transmission_s, latency_s, np.zeros(len(sender), np.bool_)


def makespan_s(problem: SchedulingProblem, orders: Orders) -> float:
    """Return how long the pipeline takes with these orders, seconds.

    Raises:
        InputError: The actions wait for each other in a cycle.
    """
    prepared = prepare(problem, orders)
    times_s = times_of(problem, orders, prepared)
    return float(longest_path(prepared.graph, prepared.sequence, prepared.acting, *times_s))


def _workers(problem: SchedulingProblem, orders: Orders) -> Workers:
    """The problem's workers with one replica each, which takes every microbatch whole."""
    stages, microbatches = problem.stages, problem.microbatches
    is_last = np.zeros(stages, np.bool_)
    is_last[-1] = True
    return Workers(
        orders.first_action,
        orders.kind,
        orders.stage.astype(np.int64),
        orders.microbatch.astype(np.int64),
        np.arange(problem.worker_count + 1),
        np.array(problem.workers, np.int64),
        is_last,
        np.arange(stages, dtype=np.int64) * (2 * microbatches),
        np.tile(np.array([0, 1], np.int64), stages * microbatches),
        np.arange(stages + 1, dtype=np.int64) * (3 * microbatches),
    )
