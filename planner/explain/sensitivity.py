"""How much shorter a step would be if one thing were better: each answer is a step that is evaluated once more.

Links, latencies, compute and sums of gradients become `BETTER` times as good one at a time, in the order of actions
that the plan has. Memory is another matter, since a fifth more of it may not hold one microbatch more: there the step
is that of a plan with as many microbatches in flight as hide the round trips, on devices that hold everything.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.plan.plan import EXPLICIT, Pipeline, Plan
from planner.scenario.scenario import Scenario
from planner.scenario.variants import Ends, with_better_links, with_unlimited_memory
from planner.step.compile import CompiledStep, compile_step
from planner.step.evaluate import blocking_messages, message_times, nominal_paths, step_time_s
from planner.step.graph import Flags, Floats, longest_path, walk
from planner.step.orders import hiding_depths
from planner.step.tables import SYNC

# What is better is so many times as fast, or takes one by so much of the time.
BETTER = 1.2


@dataclass(frozen=True, eq=False, slots=True)
class Sensitivity:
    """A step that can be evaluated again with something better.

    Attributes:
        plan: A checked plan.
        scenario: What it is for.
        step: The plan, compiled.
        step_s: Seconds of the step as things are.
    """

    plan: Plan
    scenario: Scenario
    step: CompiledStep
    step_s: float

    def compute_gain(self, devices: Collection[str] | None = None) -> float:
        """Return the share of the step that is saved where devices, all if None, compute `BETTER` times as fast."""
        slowdown = dict.fromkeys(self.plan.devices if devices is None else devices, 1 / BETTER)
        return self._gain(self._variant_s(slowdown=slowdown))

    def link_gain(self, only: Collection[Ends] | None = None) -> float:
        """Return the share that is saved where links, all if None, have `BETTER` times the rate between stages."""
        return self._gain(self._variant_s(with_better_links(self.scenario, BETTER, 1.0, only), ~self.is_sum))

    def latency_gain(self, only: Collection[Ends] | None = None) -> float:
        """Return the share that is saved where transfers between stages have a latency by `BETTER` shorter."""
        return self._gain(self._variant_s(with_better_links(self.scenario, 1.0, 1 / BETTER, only), ~self.is_sum))

    def sums_gain(self, only: Collection[Ends] | None = None) -> float:
        """Return the share that is saved where sums of gradients travel `BETTER` times as fast, all told."""
        return self._gain(self._variant_s(with_better_links(self.scenario, BETTER, 1 / BETTER, only), self.is_sum))

    def depth_gain(self) -> float:
        """Return the share that is saved by depths that hide the round trips, whatever memory they take."""
        endless = with_unlimited_memory(self.scenario)
        return self._gain(step_time_s(self.hiding_plan(), endless))

    def sums_share(self) -> float:
        """Return the share of the step that would be saved without any sums of gradients."""
        times = self._message_times(self.scenario)
        return self._gain(
            self._evaluated_s(self.step.actions.duration_s, *(np.where(self.is_sum, 0.0, t) for t in times))
        )

    def hiding_plan(self) -> Plan:
        """Return the plan with the depths that hide its round trips, whatever memory they take."""
        if self.plan.schedule == EXPLICIT:
            return self.plan
        endless = with_unlimited_memory(self.scenario)
        pipelines = (_hiding(pipeline, endless, self.plan.compression) for pipeline in self.plan.pipelines)
        return replace(self.plan, pipelines=tuple(pipelines))

    @property
    def is_sum(self) -> Flags:
        """Which messages carry gradients to be summed, [messages]."""
        return np.asarray(self.step.actions.kind[self.step.messages.sender] == SYNC, np.bool_)

    def _gain(self, step_s: float) -> float:
        return 1 - step_s / self.step_s if self.step_s > 0 else 0.0

    def _variant_s(
        self,
        scenario: Scenario | None = None,
        changed: Flags | None = None,
        slowdown: Mapping[str, float] | None = None,
    ) -> float:
        """Seconds of the step in which some messages travel as in another scenario, or devices are slower."""
        durations_s = self.step.actions.duration_s
        if slowdown:
            factors = np.array([slowdown.get(actor, 1.0) for actor in self.step.actors])
            durations_s = durations_s * factors[self.step.actions.actor]
        times = self._message_times(self.scenario)
        if scenario is not None and changed is not None:
            others = self._message_times(scenario)
            times = (np.where(changed, others[0], times[0]), np.where(changed, others[1], times[1]))
        return self._evaluated_s(durations_s, *times)

    def _message_times(self, scenario: Scenario) -> tuple[Floats, Floats]:
        return message_times(self.step, nominal_paths(self.plan, scenario))

    def _evaluated_s(self, durations_s: Floats, transmission_s: Floats, latency_s: Floats) -> float:
        sequence, acting, _ = walk(self.step.graph)
        blocking = blocking_messages(self.step, self.scenario)
        return float(longest_path(self.step.graph, sequence, acting, durations_s, transmission_s, latency_s, blocking))


def sensitivity_of(plan: Plan, scenario: Scenario) -> Sensitivity:
    """Return the step of a checked plan on steady links, to be evaluated again.

    Raises:
        InputError: The order of actions deadlocks.
    """
    return Sensitivity(plan, scenario, compile_step(plan, scenario), step_time_s(plan, scenario))


def _hiding(pipeline: Pipeline, scenario: Scenario, compression: str) -> Pipeline:
    """The pipeline at least as deep as hides its round trips, where every stage has a worker of its own."""
    count = len(pipeline.stages)
    if count == 1 or len(set(pipeline.workers)) < count:
        return pipeline
    depths = hiding_depths(pipeline, scenario, compression)
    stages = (
        replace(stage, in_flight=max(stage.in_flight, depth))
        for stage, depth in zip(pipeline.stages, depths, strict=True)
    )
    return replace(pipeline, stages=tuple(stages))
