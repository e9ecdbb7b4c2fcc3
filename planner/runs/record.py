"""The interface of backends, the record of a run, and its progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from planner.adapt.policy import Decision, Policy
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.runs.gradient_noise import GradientNorms
from planner.scenario.scenario import Scenario
from traces.common.units import number_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class RealNetwork:
    """The network of an executed run.

    Attributes:
        emulator: Emulator of the scenario's links: ``none``, ``shaper`` or ``relay``.
        tcp: TCP settings of the hosts by their Linux names (``tcp_congestion_control``), without those that could not
            be read.
    """

    emulator: str
    tcp: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of a run: its input, events, decisions and measurements.

    Attributes:
        backend: Kind of run: ``simulated``, ``paced`` or ``real``.
        scenario: Scenario of the run.
        plan: Plan of the first step.
        events: Events in the order of time.
        decisions: Decisions of the policy in the order of steps.
        losses: Mean loss of each step; empty where nothing was trained.
        gradient_norms: Gradient norms of each step; empty where they were not measured.
        network: Network of an executed run; None for a simulation.
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
    """Runs a plan, in a simulation or for real."""

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
        step: Index of the step.
        steps: Number of steps of the run.
        end_s: Time at which the last device finished it, seconds from the start of the run.
        step_s: Time since the step before was finished, seconds.
        samples: Number of samples of the step.
        loss: Mean loss over its samples; None where nothing is trained.
        change: Change of plan that the policy decided after the step; empty for none.
        away: Devices whose processes are away.
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
        """Throughput of this step, samples per second; 0 if it took no time."""
        return self.samples / self.step_s if self.step_s > 0 else 0.0

    def text(self) -> str:
        """Return a line for people."""
        words = [
            f"step {self.step + 1} of {self.steps}: {number_text(self.step_s)} s, "
            f"{number_text(self.samples_per_s)} samples/s"
        ]
        if self.loss is not None:
            words.append(f"loss {number_text(self.loss)}")
        if self.change:
            words.append(f"decided: {self.change}")
        if self.away:
            words.append(f"away: {', '.join(self.away)}")
        return ", ".join(words)


ProgressCallback = Callable[[Progress], None]
