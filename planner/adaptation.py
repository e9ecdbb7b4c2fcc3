"""The adaptation loop: which plan each step runs, as a policy decides it."""

from collections.abc import Iterable
from dataclasses import fields

from planner.check import check_plan
from planner.events import Event
from planner.observation import observe
from planner.plan import Plan, Replica
from planner.policy import DECISION_LAG_STEPS, Decision, Policy, describe_change
from planner.scenario import Scenario
from traces.errors import InputError, RunError

# What of a plan each step may have for itself, and of what only the placement must stay; all else is set up once.
_CHANGEABLE = ("strategy", "schedule", "order", "pipelines")


class Adaptation:
    """Holds the plan of each step; a finished step's events go in, a decision may come out.

    Both backends drive this one class, and a recorded run can be replayed through it.

    Raises:
        RunError: The policy returned a plan that breaks the scenario's invariants, needs layers to move, or changes
            what a running job cannot: anything but microbatches, depths, recomputation, schedule and orders.
    """

    def __init__(self, policy: Policy, plan: Plan, scenario: Scenario) -> None:
        self._policy = policy
        self._scenario = scenario
        self._timeline: list[tuple[int, Plan]] = [(0, plan)]
        self.decisions: list[Decision] = []

    def plan_for(self, step: int) -> Plan:
        """Return the plan that ``step`` runs; steps up to the last finished one plus the lag are known."""
        return next(plan for first_step, plan in reversed(self._timeline) if first_step <= step)

    def finish_step(self, step: int, events: Iterable[Event]) -> Decision | None:
        """Show the policy a finished step; return what it decided, if anything."""
        current = self._timeline[-1][1]
        proposed = self._policy.decide(observe(events, step, self.plan_for(step)), current)
        if proposed is None or proposed == current:
            return None
        name = type(self._policy).__name__
        try:
            check_plan(proposed, self._scenario)
        except InputError as error:
            raise RunError(f"after step {step} policy {name} returned a plan that cannot be: {error}") from error
        if _placement(proposed) != _placement(current):
            raise RunError(
                f"after step {step} policy {name} moves layers to other devices, which no backend can carry out yet; "
                "it may change microbatches and depths"
            )
        for name_of_field in _fixed_fields():
            before, after = getattr(current, name_of_field), getattr(proposed, name_of_field)
            if before != after:
                raise RunError(
                    f"after step {step} policy {name} changes '{name_of_field}' from {before!r} to {after!r}, which a "
                    "running job keeps; it may change microbatches, depths, recomputation, schedule and orders"
                )
        decision = Decision(step, step + DECISION_LAG_STEPS, proposed, describe_change(current, proposed))
        self._timeline.append((decision.first_step, proposed))
        self.decisions.append(decision)
        return decision


def _fixed_fields() -> list[str]:
    return [field.name for field in fields(Plan) if field.name not in _CHANGEABLE]


def _placement(plan: Plan) -> list[list[tuple[int, int, tuple[Replica, ...]]]]:
    """Which device holds which layers."""
    return [
        [(stage.first_layer, stage.end_layer, stage.replicas) for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]
