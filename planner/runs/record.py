"""What a backend is, and what a run leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from planner.adapt.policy import Decision, Policy
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.runs.gradient_noise import GradientNorms
from planner.scenario.scenario import Scenario

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class RealNetwork:
    """What carried the bytes of a run that was carried out.

    Attributes:
        emulator: What made the scenario's links: ``none``, ``shaper`` or ``relay``.
        tcp: The settings of TCP in effect on the hosts, by the names of Linux (``tcp_congestion_control``); without
            those that could not be read.
    """

    emulator: str
    tcp: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """All that a run leaves.

    Attributes:
        backend: ``simulated``, ``paced`` or ``real``.
        scenario: What was run.
        plan: The plan of the first step.
        events: In order of time.
        decisions: In order of steps.
        losses: Mean loss of each step; empty where nothing was trained.
        gradient_norms: Of each step; empty where the noise of the gradient was not measured.
        network: What carried the bytes; None of a simulation.
    """

    backend: str
    scenario: Scenario
    plan: Plan
    events: Sequence[Event]
    decisions: tuple[Decision, ...]
    losses: tuple[float, ...] = ()
    gradient_norms: tuple[GradientNorms, ...] = ()
    network: RealNetwork | None = None

    @property
    def metrics(self) -> "pd.DataFrame":
        """The metrics of each step: a row per step, indexed by ``step``.

        Columns: ``end_s``, seconds from the start of the run; ``step_s``, seconds since the step before ended;
        ``samples_per_s``; ``loss``, NaN where nothing was trained; and ``decision``, the change of the plan that the
        policy made for this step, empty if it made none. `planner.runs.metrics.measure` sums the run up.
        """
        from planner.runs.metrics import step_metrics

        return step_metrics(self)

    @property
    def event_frame(self) -> "pd.DataFrame":
        """The events as a table: a row per event in order of time, a column per field of `Event`."""
        from planner.events.log import as_log

        return as_log(self.events).frame()


class Backend(Protocol):
    """Carries out a plan, in a model or for real."""

    def run(self, scenario: Scenario, plan: Plan, policy: Policy | None, steps: int) -> RunRecord:
        """Run ``steps`` training steps.

        Raises:
            InputError: The scenario cannot carry out the plan.
            RunError: The run started but could not finish.
        """


@dataclass(frozen=True, slots=True)
class Progress:
    """A step that all devices have finished.

    Attributes:
        step: Index.
        steps: Of the run.
        end_s: When the last device finished it, seconds of the run.
        step_s: Since the step before was finished, seconds.
        samples: Of the step.
        loss: Mean over its samples; None where nothing is trained.
        change: What the policy decided when it had seen the step; empty for nothing.
        away: Devices whose processes are not there.
    """

    step: int
    steps: int
    end_s: float
    step_s: float
    samples: int
    loss: float | None
    change: str
    away: tuple[str, ...]

    @property
    def samples_per_s(self) -> float:
        """Of this step alone."""
        return self.samples / self.step_s if self.step_s > 0 else 0.0

    def text(self) -> str:
        """Return a line for people."""
        words = [f"step {self.step + 1} of {self.steps}: {self.step_s:.3g} s, {self.samples_per_s:.4g} samples/s"]
        if self.loss is not None:
            words.append(f"loss {self.loss:.4f}")
        if self.change:
            words.append(f"decided: {self.change}")
        if self.away:
            words.append(f"away: {', '.join(self.away)}")
        return ", ".join(words)


Watch = Callable[[Progress], None]
