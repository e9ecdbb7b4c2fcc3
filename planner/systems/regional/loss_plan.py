"""A plan to a loss: what it is wanted for, how it trains, and what it takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan
from planner.scenario.convergence import LossLaw, Steps, TrainingMode
from planner.systems.auto.objective import Limits

TIME, COST = "time-to-loss", "cost-to-loss"
LOSS_OBJECTIVES = (TIME, COST)

DILOCO, STREAMING = "diloco", "diloco-streaming"

# Intervals and fragments that are tried.
INTERVALS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
FRAGMENTS = (1, 2, 4, 8)

# Learning rate of outer steps with momentum (arXiv 2311.08105).
_LEARNING_RATE = 0.7
# Share of its own parameters that a worker keeps in a streaming one (arXiv 2501.18512).
_MIXING = 0.5


@dataclass(frozen=True)
class LossGoal(Limits):
    """What a plan is wanted for, and limits that it must keep.

    Attributes:
        name: ``time-to-loss`` or ``cost-to-loss``.
        loss: The loss to reach, above zero.
        law: The law of the task's loss.
        assumed: Whether the law is not of this task, but from publications.
    """

    name: str
    loss: float
    law: LossLaw
    assumed: bool = False


@dataclass(frozen=True)
class LossPlan:
    """A plan, and what it takes to a loss.

    Attributes:
        mode: How the plan trains, for the law.
        steps: Steps to the loss.
        worker_steps_s: Time of a step of each worker without exchanges, seconds.
        step_s: Mean time of a step with them, seconds.
        price_per_hour: Price of the devices, US dollars per hour.
        traffic_price: Price of what a step sends, US dollars.
    """

    plan: Plan
    mode: TrainingMode
    steps: Steps
    worker_steps_s: tuple[float, ...]
    step_s: float
    price_per_hour: float
    traffic_price: float

    @property
    def inner_s(self) -> float:
        """Time of a step of the slowest worker without exchanges, seconds."""
        return max(self.worker_steps_s)

    @property
    def step_price(self) -> float:
        """Price of a step, US dollars."""
        return self.price_per_hour * self.step_s / 3600 + self.traffic_price

    @cached_property
    def time_s(self) -> float:
        """Time to the loss, seconds."""
        return self.steps.expected * self.step_s

    @cached_property
    def cost(self) -> float:
        """Price of the training up to the loss, US dollars."""
        return self.steps.expected * self.step_price


@dataclass(frozen=True)
class FoundPlan:
    """The result of the search: the best plan, and the best of those that sum gradients in every step, if any."""

    best: LossPlan
    summed: LossPlan | None


def mode_of(plan: Plan) -> TrainingMode:
    """Return how a plan trains, for the law."""
    how, outer = plan.synchronisation, plan.synchronisation.outer
    if not how.has_outer_step:
        return TrainingMode(how.method, plan.global_batch)
    settings = (outer.fragments, outer.compression, outer.momentum)
    return TrainingMode(how.method, plan.global_batch, len(plan.pipelines), how.interval_steps, *settings)


def outer_modes(law: LossLaw, mode: TrainingMode, methods: Sequence[str], layers: int) -> Iterator[TrainingMode]:
    """Yield a mode with other exchanges, for a model with this many layers.

    These have every compression of the law, every one of the methods, and every number of fragments and interval that
    is tried; the interval changes first.
    """
    for compression, method in product(law.compressions, methods):
        for fragments in (1,) if method == DILOCO else tuple(each for each in FRAGMENTS if each <= layers):
            for interval in INTERVALS:
                if fragments <= interval:
                    exchanges = replace(mode, method=method, compression=compression, fragments=fragments)
                    yield replace(exchanges, interval_steps=interval)


def most_overlap(mode: TrainingMode) -> int:
    """Return the most steps between sending a fragment and the outer step: a quarter of the interval.

    Convergence is measured with as many, since workers learn less from older parameters.
    """
    return min(max(1, mode.interval_steps // 4), mode.interval_steps // mode.fragments, mode.interval_steps - 1)


def outer_settings(mode: TrainingMode, overlap_steps: int, exchange: str | None = None) -> OuterStep:
    """Return the settings with which the planner proposes a method, and with which its convergence is measured.

    Without momentum the outer step is the average of the workers.
    """
    learning_rate = _LEARNING_RATE if mode.momentum else 1.0
    whole = OuterStep(learning_rate, mode.momentum, compression=mode.compression, exchange=exchange)
    if mode.method == DILOCO:
        return whole
    return replace(
        whole,
        fragments=mode.fragments,
        pattern="strided",
        overlap_steps=overlap_steps,
        mixing=_MIXING,
    )


def extrapolations(found: LossPlan, goal: LossGoal) -> list[str]:
    """Return in what the law goes beyond what it was fitted to, in words."""
    law, said = goal.law, []
    if found.mode.workers > law.most_workers:
        said.append(f"{found.mode.workers} workers (at most {law.most_workers} were measured)")
    if goal.loss < law.least_loss:
        said.append(f"a loss of {goal.loss:g} (the lowest that was measured is {law.least_loss:.4g})")
    return said
