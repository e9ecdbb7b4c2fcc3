"""Policies: what to do differently, seen from what was observed; the same object in both backends."""

from dataclasses import dataclass
from typing import Protocol

from planner.observation import Observation
from planner.plan import Plan

# What step k showed can shape step k + 2 at the earliest: while step k + 1 runs, the observation travels and
# the decision comes back, so that nobody waits for either. The simulator keeps the same distance.
DECISION_LAG_STEPS = 2


class Policy(Protocol):
    """Decides on a plan from observations. Pure: a state of its own, no clock, no input or output.

    It knows nothing of the backend: an observation says what happened, the returned plan what should be.
    """

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan to change to, or None to stay.

        Args:
            observation: Of one finished step; steps come in order, each once.
            plan: The latest plan decided on.
        """


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of plan.

    Attributes:
        observed_step: The step whose observation led to it.
        first_step: The first step that runs the new plan.
        plan: The new plan.
        change: What is different, for people.
    """

    observed_step: int
    first_step: int
    plan: Plan
    change: str


def describe_change(old: Plan, new: Plan) -> str:
    """Return what differs between two plans in one line."""
    parts = []
    for index, (before, after) in enumerate(zip(old.pipelines, new.pipelines, strict=False)):
        name = f"pipeline {index}: " if len(new.pipelines) > 1 else ""
        if before.microbatches != after.microbatches:
            parts.append(f"{name}microbatches {len(before.microbatches)} -> {len(after.microbatches)}")
        depths = [[stage.in_flight for stage in pipeline.stages] for pipeline in (before, after)]
        if depths[0] != depths[1]:
            parts.append(f"{name}in flight {depths[0]} -> {depths[1]}")
    return "; ".join(parts) or "another plan"
