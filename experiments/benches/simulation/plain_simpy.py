"""The yardstick: a pipeline in SimPy as a textbook writes it, with a process and a resource for everything."""

from collections.abc import Sequence

import simpy

from planner.plan.actions import Action, Kind
from planner.schedules.kernel.problem import SchedulingProblem

Waiting = simpy.events.ProcessGenerator


class PlainPipeline:
    """One step: a process per worker that claims its processor, a process per transfer that claims its channel."""

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
        """Run the step; return how long it takes, seconds."""
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
