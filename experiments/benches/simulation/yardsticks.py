"""Two other ways to compute a pipeline's makespan: the longest path in its graph, and a textbook SimPy model.

In the SimPy model every worker and every transfer is a process, and every processor and channel a resource.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import simpy

from planner.plan.actions import Action, Kind
from planner.schedules.kernel.problem import FORWARD, Orders, SchedulingProblem
from planner.step.build import Origins, Workers, connect, trace_origins
from planner.step.graph import Flags, Floats, Ints, StepGraph, longest_path, walk


class PreparedOrders(NamedTuple):
    """The graph of a pipeline's orders, for which a makespan can be computed repeatedly.

    Attributes:
        graph: The graph of one pipeline, an actor per worker.
        origins: Maps the graph's actions and messages to those of the problem.
        sequence: Actions in topological order, shape (actions,).
        acting: The actor of each action in ``sequence``, shape (actions,).
    """

    graph: StepGraph
    origins: Origins
    sequence: Ints
    acting: Ints


def prepare(problem: SchedulingProblem, orders: Orders) -> PreparedOrders:
    """Build the graph of a pipeline, whose orders must not deadlock."""
    first_action, origins = trace_origins(_workers(problem, orders))
    graph = connect(first_action, origins.actor, origins.sender, origins.receiver)
    sequence, acting, _ = walk(graph)
    assert len(sequence) == graph.actions, "the actions wait for each other in a cycle"
    return PreparedOrders(graph, origins, sequence, acting)


def times_of(
    problem: SchedulingProblem, orders: Orders, prepared: PreparedOrders
) -> tuple[Floats, Floats, Floats, Flags, Floats, Floats]:
    """Return the arguments of `longest_path` for the problem's times.

    Returns:
        The duration of each action, the transmission time and the latency of each message, in seconds; whether each
        message blocks its sender, which is always False; and the times of its copies, which are 0.
    """
    kind, stage = orders.kind[prepared.origins.ordered], orders.stage[prepared.origins.ordered]
    microbatch = orders.microbatch[prepared.origins.ordered]
    whole_s = problem.backward_input_s + problem.backward_weight_s
    table_s = np.stack([problem.forward_s, whole_s, problem.backward_input_s, problem.backward_weight_s])
    duration_s = table_s[kind, stage, microbatch]
    sender = prepared.origins.sender
    forward = kind[sender] == FORWARD
    boundary = stage[sender] - ~forward
    carried = microbatch[sender]
    transmission_s = np.where(
        forward, problem.forward_transmission_s[boundary, carried], problem.backward_transmission_s[boundary, carried]
    )
    latency_s = np.where(forward, problem.forward_latency_s[boundary], problem.backward_latency_s[boundary])
    no_copy_s = np.zeros(len(sender))
    return duration_s, transmission_s, latency_s, np.zeros(len(sender), np.bool_), no_copy_s, no_copy_s


def makespan_s(problem: SchedulingProblem, orders: Orders) -> float:
    """Return the makespan of a pipeline with orders that do not deadlock, seconds."""
    prepared = prepare(problem, orders)
    times_s = times_of(problem, orders, prepared)
    return float(longest_path(prepared.graph, prepared.sequence, prepared.acting, *times_s))


def _workers(problem: SchedulingProblem, orders: Orders) -> Workers:
    """Return the problem's workers in the form from which graphs are built, with one replica each."""
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


Waiting = simpy.events.ProcessGenerator


class PlainPipeline:
    """One step in SimPy: a process per worker requests its processor, a process per transfer its channel."""

    def __init__(self, problem: SchedulingProblem, orders: Sequence[Sequence[Action]]) -> None:
        self._problem = problem
        self._orders = orders
        self._environment = simpy.Environment()
        stages = range(problem.stages)
        self._processors = [simpy.Resource(self._environment) for _ in stages]
        self._forward = [simpy.Resource(self._environment) for _ in stages]
        self._backward = [simpy.Resource(self._environment) for _ in stages]
        self._arrivals: dict[tuple[str, int, int], simpy.Event] = {}
        self._end_s = 0.0

    def makespan_s(self) -> float:
        """Run the step; return its makespan, seconds."""
        for stage in range(self._problem.stages):
            self._environment.process(self._work(stage))
        self._environment.run()
        return self._end_s

    def _arrival(self, way: str, stage: int, microbatch: int) -> simpy.Event:
        return self._arrivals.setdefault((way, stage, microbatch), self._environment.event())

    def _work(self, stage: int) -> Waiting:
        problem, last = self._problem, self._problem.stages - 1
        durations_s = {
            Kind.FORWARD: problem.forward_s,
            Kind.BACKWARD_INPUT: problem.backward_input_s,
            Kind.BACKWARD_WEIGHT: problem.backward_weight_s,
        }
        for action in self._orders[stage]:
            microbatch = action.microbatch
            if action.kind is Kind.FORWARD and stage > 0:
                yield self._arrival("forward", stage, microbatch)
            if action.kind is Kind.BACKWARD_INPUT and stage < last:
                yield self._arrival("backward", stage, microbatch)
            with self._processors[stage].request() as turn:
                yield turn
                yield self._environment.timeout(durations_s[action.kind][stage, microbatch])
            if action.kind is Kind.FORWARD and stage < last:
                self._environment.process(self._transfer("forward", stage, stage + 1, microbatch))
            if action.kind is Kind.BACKWARD_INPUT and stage > 0:
                self._environment.process(self._transfer("backward", stage, stage - 1, microbatch))
        self._end_s = max(self._end_s, self._environment.now)

    def _transfer(self, way: str, stage: int, target: int, microbatch: int) -> Waiting:
        problem, boundary = self._problem, min(stage, target)
        if way == "forward":
            channel = self._forward[boundary]
            transmission_s = problem.forward_transmission_s[boundary, microbatch]
            latency_s = problem.forward_latency_s[boundary]
        else:
            channel = self._backward[boundary]
            transmission_s = problem.backward_transmission_s[boundary, microbatch]
            latency_s = problem.backward_latency_s[boundary]
        with channel.request() as turn:
            yield turn
            yield self._environment.timeout(transmission_s)
        yield self._environment.timeout(latency_s)
        self._arrival(way, target, microbatch).succeed()
