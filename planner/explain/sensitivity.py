"""The gains of improvements: how much shorter a step would be with faster devices or links, or with more memory.

Each gain is found by evaluating the step once more. Compute, bandwidths, latencies and gradient sums are improved by
the factor `BETTER`, one at a time, and the order of actions stays the same. The gain of memory is found differently,
since 20 % more memory may not hold even one more microbatch: devices get unlimited memory, and stages keep as many
microbatches in flight as hide the round trips.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from planner.plan.plan import EXPLICIT, Pipeline, Plan
from planner.scenario.scenario import Ends, Scenario, with_better_links, with_unlimited_memory
from planner.step.compile import CompiledStep, compile_step
from planner.step.evaluate import makespan_s, message_times, nominal_paths, step_time_s
from planner.step.graph import Flags, Floats
from planner.step.orders import hiding_depths
from planner.step.tables import SYNC

# Factor of an improvement, by which a rate is multiplied or a time divided.
BETTER = 1.2


@dataclass(frozen=True, eq=False, slots=True)
class Sensitivity:
    """A step of a plan, and the gains of improvements to its devices and links.

    A gain is the share of the step time ``step_s`` that an improvement saves: 0.1 if the step takes 10 % less time.
    """

    plan: Plan
    scenario: Scenario
    step: CompiledStep
    step_s: float

    def compute_gain(self, devices: Collection[str] | None = None) -> float:
        """Return the gain if the named devices (None: all) computed `BETTER` times as fast."""
        slowdown = dict.fromkeys(self.plan.devices if devices is None else devices, 1 / BETTER)
        return self._gain(step_time_s(self.plan, self.scenario, slowdown=slowdown))

    def link_gain(self, only: Collection[Ends] | None = None) -> float:
        """Return the gain if the links (None: all) had `BETTER` times the bandwidth for transfers between stages."""
        return self._gain(self._variant_s(with_better_links(self.scenario, BETTER, 1.0, only), ~self.is_sum))

    def latency_gain(self, only: Collection[Ends] | None = None) -> float:
        """Return the gain if the links (None: all) had 1 / `BETTER` of the latency for transfers between stages."""
        return self._gain(self._variant_s(with_better_links(self.scenario, 1.0, 1 / BETTER, only), ~self.is_sum))

    def sums_gain(self, only: Collection[Ends] | None = None) -> float:
        """Return the gain if sums had links (None: all) with `BETTER` times the rate, 1 / `BETTER` the latency."""
        return self._gain(self._variant_s(with_better_links(self.scenario, BETTER, 1 / BETTER, only), self.is_sum))

    def depth_gain(self) -> float:
        """Return the gain of `hiding_plan`, evaluated with unlimited memory."""
        endless = with_unlimited_memory(self.scenario)
        return self._gain(step_time_s(self.hiding_plan(), endless))

    def sums_share(self) -> float:
        """Return the gain if gradient sums took no time."""
        times = (np.where(self.is_sum, 0.0, each) for each in self._message_times(self.scenario))
        return self._gain(makespan_s(self.step, self.plan, self.scenario, self.step.actions.duration_s, *times))

    def hiding_plan(self) -> Plan:
        """Return the plan with as many microbatches in flight as hide the round trips, even if memory is too small.

        Plans with an explicit order of actions are returned unchanged.
        """
        if self.plan.schedule == EXPLICIT:
            return self.plan
        endless = with_unlimited_memory(self.scenario)
        pipelines = (_hiding(pipeline, endless, self.plan.compression) for pipeline in self.plan.pipelines)
        return replace(self.plan, pipelines=tuple(pipelines))

    @property
    def is_sum(self) -> Flags:
        """Whether each message belongs to a gradient sum, not to a transfer between stages; bool [messages]."""
        return np.asarray(self.step.actions.kind[self.step.messages.sender] == SYNC, np.bool_)

    def _gain(self, step_s: float) -> float:
        return 1 - step_s / self.step_s if self.step_s > 0 else 0.0

    def _variant_s(self, better: Scenario, changed: Flags) -> float:
        """Return the step time if the messages flagged in ``changed`` took as long as in ``better``, seconds."""
        pairs = zip(self._message_times(better), self._message_times(self.scenario), strict=True)
        times = (np.where(changed, other, own) for other, own in pairs)
        return makespan_s(self.step, self.plan, self.scenario, self.step.actions.duration_s, *times)

    def _message_times(self, scenario: Scenario) -> tuple[Floats, Floats]:
        return message_times(self.step, nominal_paths(self.plan, scenario))


def sensitivity_of(plan: Plan, scenario: Scenario) -> Sensitivity:
    """Return the compiled step of a checked plan with its time at declared rates.

    Raises:
        InputError: The order of actions deadlocks.
    """
    return Sensitivity(plan, scenario, compile_step(plan, scenario), step_time_s(plan, scenario))


def _hiding(pipeline: Pipeline, scenario: Scenario, compression: str) -> Pipeline:
    """Return the pipeline with each ``in_flight`` raised to hide round trips; unchanged if a worker has two stages."""
    count = len(pipeline.stages)
    if count == 1 or len(set(pipeline.workers)) < count:
        return pipeline
    depths = hiding_depths(pipeline, scenario, compression)
    return pipeline.with_depths(
        max(stage.in_flight, depth) for stage, depth in zip(pipeline.stages, depths, strict=True)
    )
