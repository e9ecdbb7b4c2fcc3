"""Contents of messages between the head and the ranks: plans of steps, the start of a session, rows of a step.

A session is a set of ranks that are connected with each other; it ends when one of them is lost or further ranks join.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

from executor.core.job import RunConfig
from planner.adapt.gradient_noise import LocalNorms
from planner.adapt.migration import LayerTransfer
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.events.event import Event, EventKind
from planner.files.plan import parse_plan, plan_json
from planner.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class NewPlan:
    """The plan of a step, as the head sends it to the ranks.

    Attributes:
        samples_before: Samples of all steps before this one: the position of the step's first sample in the data.
        moves: Layers whose state is sent to other ranks before the step; None if every rank keeps its layers.
        joins: Whether the plan uses devices outside the session. The session then ends before the step, and another one
            begins together with those devices.
    """

    plan: Plan
    samples_before: int
    moves: tuple[LayerTransfer, ...] | None = None
    joins: bool = False

    def after(self, steps: int) -> "NewPlan":
        """Return the plan of the step that follows after ``steps`` steps, if all of them have this plan."""
        return NewPlan(self.plan, self.samples_before + steps * self.plan.global_batch)

    def to_data(self) -> dict[str, Any]:
        """Return a dictionary for `json.dumps`."""
        moves = None if self.moves is None else [asdict(move) for move in self.moves]
        plan = plan_json(self.plan)
        return {"plan": plan, "samples_before": self.samples_before, "moves": moves, "joins": self.joins}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "NewPlan":
        """Return the object from the result of `to_data`."""
        moves = None if data["moves"] is None else tuple(LayerTransfer(**move) for move in data["moves"])
        return cls(parse_plan(data["plan"]), data["samples_before"], moves, data["joins"])


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """A new plan before whose first step layers change devices.

    Attributes:
        step: The first step of the new plan.
        to: The new plan, with the layers that change devices.
        ready_s: Run second at which the plan arrived at this rank; minus infinity if the rank did not wait for it.
    """

    step: int
    to: NewPlan
    ready_s: float


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The specification of a session, by which its ranks begin it.

    Attributes:
        number: Number of the session, from 0.
        ranks: The job's ranks in the session; the index of a rank here is its rank in torch's process group.
        first_step: The first step of the session; training resumes with the parameters before this step.
        durable: The newest step before which copies of all layers are known to be complete; training could resume
            from this step after another loss.
        plans: The plans of ``first_step`` and of the steps after it, as far as they are known. The moves of the first
            plan send the state before ``first_step`` to ranks that lack layers.
        store_prefix: A random prefix of the keys in the store through which gloo connects these ranks.
        origin_s: Second 0 of the run by the head's clock; None if the ranks have not agreed on it yet.
        local_delivery_s: Time in seconds in which this host delivers a message to itself, measured before the run.
        syncers: Addresses of the processes that take outer steps, by device; empty if there are none.
    """

    number: int
    ranks: tuple[int, ...]
    first_step: int
    durable: int
    plans: tuple[NewPlan, ...]
    store_prefix: str
    origin_s: float | None = None
    local_delivery_s: float = 0.0
    syncers: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of_run(cls, plan: Plan, ranks: int, run: RunConfig, store_prefix: str) -> "SessionSpec":
        """Return the first session of a run, with the plans that no decision can change: `DECISION_LAG_STEPS` steps."""
        known, first = min(DECISION_LAG_STEPS, run.steps - run.first_step), NewPlan(plan, run.first_sample)
        plans = tuple(first.after(steps) for steps in range(known))
        return cls(0, tuple(range(ranks)), run.first_step, run.first_step, plans, store_prefix)

    def to_data(self) -> dict[str, Any]:
        """Return a dictionary for `json.dumps`."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {**plain, "plans": [each.to_data() for each in self.plans]}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "SessionSpec":
        """Return the object from the result of `to_data`; unknown entries are ignored."""
        plain = {name: data[name] for name in cls.__slots__}
        plans = tuple(NewPlan.from_data(each) for each in data["plans"])
        syncers = {name: (str(host), int(port)) for name, (host, port) in data["syncers"].items()}
        return cls(**{**plain, "ranks": tuple(data["ranks"]), "plans": plans, "syncers": syncers})


class AwayWorker(NamedTuple):
    """A worker that is away: its index, the step with which it would go on, and the number of its next session."""

    worker: int
    step: int
    session: int


@dataclass(frozen=True, slots=True)
class CheckpointMark:
    """What is said of a checkpoint of workers at their own speed.

    Attributes:
        checkpoint: Number of the global batch before which it counts.
        away: The workers that give nothing to it.
    """

    checkpoint: int
    away: tuple[AwayWorker, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """Return a dictionary for `json.dumps`."""
        return {"checkpoint": self.checkpoint, "away": self.away}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Return the object from the result of `to_data`; unknown entries are ignored."""
        return cls(data["checkpoint"], tuple(AwayWorker(*each) for each in data["away"]))


def pack(events: list[Event], loss: float | None, kept: int | None, norms: LocalNorms | None = None) -> dict[str, Any]:
    """Return the message that a rank publishes after a step: its rows, and its parts of the loss and of the norms.

    ``kept`` is the newest step before which the rank's copies of layers are complete; None if the rank keeps none.
    """
    rows = [[getattr(event, name) for name in Event.__slots__] for event in events]
    return {"rows": rows, "loss": loss, "kept": kept, "norms": None if norms is None else asdict(norms)}


def unpack(rows: list[list[Any]], devices: Collection[str]) -> list[Event]:
    """Return the events in the ``rows`` of `pack`; raise `ValueError` for a device outside ``devices``."""
    events = [Event(EventKind(kind), *rest) for kind, *rest in rows]
    for event in events:
        if event.device not in devices or (event.peer and event.peer not in devices):
            raise ValueError(f"an event of '{event.device}' and '{event.peer}', which the job does not have")
    return events
