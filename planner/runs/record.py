"""The interface of the backends, the record of a run, and the progress that a run reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from planner.adapt.gradient_noise import GradientNorms
from planner.adapt.policy import Decision, Policy
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.units import number_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class RealNetwork:
    """The network of a run on torch.distributed.

    Attributes:
        emulator: Emulator of the scenario's links: ``none``, ``shaper`` or ``relay``.
        tcp: TCP settings of the hosts by their Linux names (``tcp_congestion_control``); settings that could not be
            read are missing.
    """

    emulator: str
    tcp: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Interruption:
    """The time in which a run did not train, since it had ended and was resumed from a checkpoint.

    Attributes:
        step: The first step after the resumption.
        start_s: End of the step before, seconds from the start of the run; what was trained after it is lost.
        end_s: Start of the step.
    """

    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of a run: its input, events, decisions and measurements.

    Attributes:
        backend: Kind of run: ``simulated``, or on torch.distributed ``paced`` (profiled compute times) or ``real``.
        plan: Plan of the first step.
        events: Events in the order of time; of a run in a folder, they are read from there when they are used.
        decisions: Decisions of the policy in the order of steps.
        losses: Mean loss of each step; empty where nothing was trained.
        gradient_norms: Gradient norms of each step; empty where they were not measured.
        network: Network of a run on torch.distributed; None for a simulation.
        samples_before: Samples of all steps before the run's first one, from whose checkpoint it resumed; usually 0.
        computed_on: Devices on which a run trained although the plan names devices of other kinds; else empty.
        interruptions: Where a run had ended and was resumed, in the order of time; its events are those of all parts.
        policy: Name of the policy, ``none`` without one; empty where it is not known.
    """

    backend: str
    scenario: Scenario
    plan: Plan
    events: Sequence[Event]
    decisions: tuple[Decision, ...]
    losses: tuple[float, ...] = ()
    gradient_norms: tuple[GradientNorms, ...] = ()
    network: RealNetwork | None = None
    computed_on: str = ""
    samples_before: int = 0
    interruptions: tuple[Interruption, ...] = ()
    policy: str = ""

    def __repr__(self) -> str:
        # A notebook shows this for a cell that ends with a run, whose scenario and events would fill many pages.
        return f"<{self.backend} run of {self.scenario.name} ({self.plan.strategy}, {self.plan.schedule})>"

    @property
    def metrics(self) -> "pd.DataFrame":
        """The metrics of each step: a row per step, indexed by ``step``.

        Columns: ``end_s``, end of the step in seconds from the start of the run; ``step_s``, seconds since the end of
        the preceding step; ``samples``; ``samples_per_s``; ``learning_rate``; ``loss``, NaN where nothing was trained;
        and ``decision``, text on the changes of plan from this step on, empty if there are none.
        `planner.runs.metrics.measure` returns the metrics of the whole run.
        """
        from planner.runs.metrics import step_metrics

        return step_metrics(self)

    @property
    def event_frame(self) -> "pd.DataFrame":
        """The events as a table: a row per event in order of time, a column per field of `Event`."""
        from planner.events.log import as_log

        return as_log(self.events).frame()


class Backend(Protocol):
    """Interface of the backends, which run a plan in the simulator or on torch.distributed."""

    def run(self, scenario: Scenario, plan: Plan, policy: Policy | None, steps: int) -> RunRecord:
        """Run ``steps`` training steps and return their record; without a policy, the plan never changes.

        Raises:
            InputError: The scenario cannot carry out the plan.
            RunError: The run started but could not finish.
        """


@dataclass(frozen=True, slots=True)
class Progress:
    """Report on step number ``step``, counted from 0, of ``steps``, which all devices have finished.

    Attributes:
        end_s: Time at which the last device finished the step, seconds from the start of the run.
        step_s: Time since the end of the preceding step, seconds.
        samples: Number of samples of the step.
        loss: Mean loss over the step's samples; None where nothing is trained.
        change: Change of plan that the policy decided after the step, as text; empty for none.
        away: Names of devices whose processes have left and not returned.
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
        """Throughput of the step, samples per second; 0 if ``step_s`` is 0."""
        return self.samples / self.step_s if self.step_s > 0 else 0.0

    def text(self) -> str:
        """Return the report as one line of text."""
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
