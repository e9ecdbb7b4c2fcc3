"""How much shorter a step would be if one thing were better; each answer evaluates the step once more.

Compute, bandwidths, latencies and sums of gradients become `BETTER` times as good one at a time, with the plan's order
of actions. Memory differs, since a fifth more of it may not hold one microbatch more: for memory the plan has as many
microbatches in flight as hide the round trips, on devices of unlimited memory.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from planner.plan.plan import EXPLICIT, Pipeline, Plan
from planner.scenario.scenario import (
    Ends,
    Scenario,
    with_better_links,
    with_unlimited_memory,
)
from planner.step.compile import CompiledStep, compile_step
from planner.step.evaluate import makespan_s, message_times, nominal_paths, step_time_s
from planner.step.graph import Flags, Floats
from planner.step.orders import hiding_depths
from planner.step.tables import SYNC

# Factor by which rates grow, or by which times are divided.
BETTER = 1.2


@dataclass(frozen=True, eq=False, slots=True)
class Sensitivity:
    """A step that can be evaluated again with something better.

    Attributes:
        plan: A plan that passes the check.
        scenario: Scenario that the plan is for.
        step: Compiled step of the plan.
        step_s: Step time in the scenario, seconds.
    """

    plan: Plan
    scenario: Scenario
    step: CompiledStep
    step_s: float

    def compute_gain(self, devices: Collection[str] | None = None) -> float:
        """Return the share of the step saved if devices, all if None, computed `BETTER` times as fast."""
        slowdown = dict.fromkeys(self.plan.devices if devices is None else devices, 1 / BETTER)
        return self._gain(step_time_s(self.plan, self.scenario, slowdown=slowdown))

    def link_gain(self, only: Collection[Ends] | None = None) -> float:
        """Return the share saved if links, all if None, had `BETTER` times the rate for transfers between stages."""
        return self._gain(self._variant_s(with_better_links(self.scenario, BETTER, 1.0, only), ~self.is_sum))

    def latency_gain(self, only: Collection[Ends] | None = None) -> float:
        """Return the share saved if links, all if None, had 1 / `BETTER` of their latency between stages."""
        return self._gain(self._variant_s(with_better_links(self.scenario, 1.0, 1 / BETTER, only), ~self.is_sum))

    def sums_gain(self, only: Collection[Ends] | None = None) -> float:
        """Return the share saved if links, all if None, had both for sums of gradients."""
        return self._gain(self._variant_s(with_better_links(self.scenario, BETTER, 1 / BETTER, only), self.is_sum))

    def depth_gain(self) -> float:
        """Return the share saved by depths that hide the round trips, whatever memory they take."""
        endless = with_unlimited_memory(self.scenario)
        return self._gain(step_time_s(self.hiding_plan(), endless))

    def sums_share(self) -> float:
        """Return the share of the step saved if sums of gradients took no time."""
        times = (np.where(self.is_sum, 0.0, each) for each in self._message_times(self.scenario))
        return self._gain(makespan_s(self.step, self.scenario, self.step.actions.duration_s, *times))

    def hiding_plan(self) -> Plan:
        """Return the plan with depths that hide its round trips, whatever memory they take."""
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

    def _variant_s(self, better: Scenario, changed: Flags) -> float:
        """Step time in seconds if some messages took as long as in another scenario."""
        pairs = zip(self._message_times(better), self._message_times(self.scenario), strict=True)
        times = (np.where(changed, other, own) for other, own in pairs)
        return makespan_s(self.step, self.scenario, self.step.actions.duration_s, *times)

    def _message_times(self, scenario: Scenario) -> tuple[Floats, Floats]:
        return message_times(self.step, nominal_paths(self.plan, scenario))


def sensitivity_of(plan: Plan, scenario: Scenario) -> Sensitivity:
    """Return the step of a checked plan at declared rates, to be evaluated again.

    Raises:
        InputError: The order of actions deadlocks.
    """
    return Sensitivity(plan, scenario, compile_step(plan, scenario), step_time_s(plan, scenario))


def _hiding(pipeline: Pipeline, scenario: Scenario, compression: str) -> Pipeline:
    """Return the pipeline with depths that hide its round trips; unchanged if deeper, or if a worker has two stages."""
    count = len(pipeline.stages)
    if count == 1 or len(set(pipeline.workers)) < count:
        return pipeline
    depths = hiding_depths(pipeline, scenario, compression)
    return pipeline.with_depths(
        max(stage.in_flight, depth) for stage, depth in zip(pipeline.stages, depths, strict=True)
    )
