"""Interface of policies, the same for both backends: how a policy decides on plans, and what a decision is."""

from dataclasses import dataclass, replace
from typing import Protocol

from planner.adapt.migration import NO_MIGRATION, Migration
from planner.adapt.observation import Observation
from planner.check import is_possible
from planner.plan.plan import EXPLICIT, Pipeline, Plan, Synchronisation
from planner.scenario.scenario import Scenario
from planner.step.orders import with_schedule

# Number of steps from an observed step to the first step with the new plan. Observation and decision travel during the
# step between the two, so that no device waits for them. Both backends have this lag.
DECISION_LAG_STEPS = 2


class Policy(Protocol):
    """Interface of policies, which decide on plans from observations.

    A policy may have state, but must not read a clock, do input or output, or depend on the backend. With a true
    attribute ``measures_unused_links`` it sees links between regions that the plan does not use (`Observation.unused`).
    A policy that forecasts may count in an attribute ``coverage`` how often that was right (`Coverage`).
    """

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the plan to change to, or None to keep ``plan``, the plan of the last decision.

        Every finished step is observed once, in order. A step that devices have left (``observation.gone`` is not
        empty) is observed in addition, before it is finished: None then means to wait for these devices, and a
        returned plan must not name them.
        """


def with_usable_schedule(old: Plan, new: Plan, scenario: Scenario) -> Plan:
    """Return ``new``, made from ``old``, with the old schedule if that is possible, and else with 1F1B.

    Explicit orders fit the old stages and microbatches only, and depths were chosen for a schedule that respects them.
    """
    is_usable = new == old or (new.schedule != EXPLICIT and is_possible(new, scenario))
    return new if is_usable else with_schedule(new, scenario, "1f1b")


def measures_unused_links(policy: Policy | None) -> bool:
    """Return whether a run measures unused links for its policy; the packets for it count in its bytes and price."""
    return bool(getattr(policy, "measures_unused_links", False))


@dataclass(slots=True)
class Coverage:
    """How many steps took a time within the interval that was forecast for them.

    Attributes:
        steps: Number of steps with a forecast.
        covered: Number of those within the interval.
    """

    steps: int = 0
    covered: int = 0

    def add(self, interval_s: tuple[float, float], duration_s: float) -> None:
        """Count a step, which took ``duration_s``."""
        least_s, most_s = interval_s
        self.steps += 1
        self.covered += least_s <= duration_s <= most_s

    @property
    def share(self) -> float | None:
        """Share of the steps that were within the interval; None if no step had a forecast."""
        return self.covered / self.steps if self.steps else None


def coverage_of(policy: Policy | None) -> Coverage | None:
    """Return how often the forecasts of a policy were right; None if it does not count that."""
    coverage = getattr(policy, "coverage", None)
    return coverage if isinstance(coverage, Coverage) else None


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of plan.

    Attributes:
        observed_step: Index of the step whose observation led to the decision.
        first_step: Index of the first step that runs the new plan; after a departure, the observed step, which is
            repeated.
        change: Description of the change in words, for reports.
        migration: Transfers of layer state before ``first_step``.
    """

    observed_step: int
    first_step: int
    plan: Plan
    change: str
    migration: Migration = NO_MIGRATION

    @property
    def answers_departure(self) -> bool:
        """Whether devices have left the observed step, which is then repeated with the new plan."""
        return self.first_step <= self.observed_step


def describe_change(old: Plan, new: Plan, migration: Migration = NO_MIGRATION) -> str:
    """Return a line of text with the differences between two plans and the transfers of layer state."""
    parts = [*_changed_devices(old, new), *_changed_layers(old, new)]
    for index, (before, after) in enumerate(zip(old.pipelines, new.pipelines, strict=False)):
        name = f"pipeline {index}: " if len(new.pipelines) > 1 else ""
        if len(before.microbatches) == len(after.microbatches) and before.microbatches != after.microbatches:
            parts.append(f"{name}other sizes of microbatches")
        elif before.microbatches != after.microbatches:
            parts.append(f"{name}microbatches {len(before.microbatches)} -> {len(after.microbatches)}")
        depths = [[stage.in_flight for stage in pipeline.stages] for pipeline in (before, after)]
        if depths[0] != depths[1]:
            parts.append(f"{name}in flight {depths[0]} -> {depths[1]}")
        if before.samples != after.samples:
            parts.append(f"{name}samples {before.samples} -> {after.samples}")
        if _shares(before) != _shares(after) and _devices(before) == _devices(after):
            parts.append(f"{name}samples of replicas {_samples(before)} -> {_samples(after)}")
    if old.global_batch != new.global_batch:
        parts.append(f"global batch {old.global_batch} -> {new.global_batch}")
    parts += [*_changed_exchanges(old.synchronisation, new.synchronisation), *_changed_orders(old, new)]
    if not parts and old.noise_scale != new.noise_scale and new.noise_scale is not None:
        parts.append(f"learning rate for a noise scale of {new.noise_scale:.3g} samples")
    for move in migration.moves:
        first, last = move.first_layer, move.end_layer - 1
        layers = f"layers {first} to {last}" if last > first else f"layer {first}"
        parts.append(f"{layers} from {move.source} to {move.target}, {move.size_bytes / 1e6:.1f} MB")
    return "; ".join(parts) or "another plan"


def _changed_devices(old: Plan, new: Plan) -> list[str]:
    dropped = [device for device in old.devices if device not in new.devices]
    joined = [device for device in new.devices if device not in old.devices]
    return [f"{word} {', '.join(names)}" for word, names in (("without", dropped), ("with", joined)) if names]


def _changed_layers(old: Plan, new: Plan) -> list[str]:
    """Return texts for changes in the number of pipelines or stages, and in the layers at which stages end."""
    if len(old.pipelines) != len(new.pipelines):
        return [f"pipelines {len(old.pipelines)} -> {len(new.pipelines)}"]
    parts = []
    for index, (before, after) in enumerate(zip(old.pipelines, new.pipelines, strict=True)):
        ends = [[stage.end_layer for stage in pipeline.stages] for pipeline in (before, after)]
        if ends[0] != ends[1]:
            name = f"pipeline {index}: " if len(new.pipelines) > 1 else ""
            parts.append(f"{name}stages end at layers {ends[0]} -> {ends[1]}")
    return parts


def _changed_exchanges(old: Synchronisation, new: Synchronisation) -> list[str]:
    settings = (
        ("steps between exchanges", old.interval_steps, new.interval_steps),
        ("fragments", old.outer.fragments, new.outer.fragments),
        ("overlap", old.outer.overlap_steps, new.outer.overlap_steps),
        ("format of pseudo-gradients", old.outer.compression, new.outer.compression),
        ("exchange", old.outer.exchange, new.outer.exchange),
    )
    parts = [f"{name} {before} -> {after}" for name, before, after in settings if before != after]
    return parts if parts or old.outer == new.outer else ["other outer steps"]


def _changed_orders(old: Plan, new: Plan) -> list[str]:
    """Return texts for another schedule, a dynamic order, and other explicit orders of the same actions."""
    parts = []
    if old.schedule != new.schedule:
        parts.append(f"schedule {old.schedule} -> {new.schedule}")
    if old.order != new.order:
        parts.append(f"order {old.order} -> {new.order}")
    bare = [[replace(pipeline, orders=()) for pipeline in plan.pipelines] for plan in (old, new)]
    if not parts and bare[0] == bare[1] and old.pipelines != new.pipelines:
        parts.append("another order of actions")
    return parts


def _devices(pipeline: Pipeline) -> list[list[tuple[str, ...]]]:
    return [[replica.devices for replica in stage.replicas] for stage in pipeline.stages]


def _shares(pipeline: Pipeline) -> list[list[float]]:
    return [[replica.share for replica in stage.replicas] for stage in pipeline.stages]


def _samples(pipeline: Pipeline) -> list[list[int]]:
    """Return the samples of one step for each stage and replica."""
    sizes = pipeline.microbatches
    return [
        [sum(end - first for first, end in column) for column in zip(*map(stage.intervals, sizes), strict=True)]
        for stage in pipeline.stages
    ]
