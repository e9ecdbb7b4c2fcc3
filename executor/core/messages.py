"""What the ranks of a job are told: the plan of a step, and with what a session begins."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from planner.adapt.migration import LayerTransfer
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.events.event import Event, EventKind
from planner.files.plan import parse_plan, plan_json
from planner.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class NewPlan:
    """What steps run from some step on.

    Attributes:
        moves: The state that travels before the first of them; None where every rank keeps its layers.
        joins: Whether the plan has devices that do not belong to the session: all finish the step before, and begin a
            new session together with those.
    """

    plan: Plan
    moves: tuple[LayerTransfer, ...] | None = None
    joins: bool = False

    def to_data(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        moves = None if self.moves is None else [asdict(move) for move in self.moves]
        return {"plan": plan_json(self.plan), "moves": moves, "joins": self.joins}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "NewPlan":
        """Return what `to_data` gave."""
        moves = None if data["moves"] is None else tuple(LayerTransfer(**move) for move in data["moves"])
        return cls(parse_plan(data["plan"]), moves, data["joins"])


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """A step before which layers change devices.

    Attributes:
        step: The first step of the new plan.
        to: The plan, and what moves before it.
        ready_s: When this rank knew of it, in run seconds, if it had to wait for that.
    """

    step: int
    to: NewPlan
    ready_s: float


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """With what a session begins: ranks that are connected with each other until one of them is lost or others join.

    Attributes:
        number: Number of the session, from 0.
        ranks: The job's ranks that belong to it, in the order of their ranks within it.
        first_step: The step with which it begins; the parameters are those before this step.
        durable: The newest step of which every rank is known to have complete copies: from it all could begin again.
        plans: The plans of this step and of those after it, as far as they are known. What moves before the first of
            them is the state of layers that ranks do not have as it was before that step.
        store_prefix: A random name for the addresses by which gloo connects these ranks.
        origin_s: Second 0 of the run by the head's clock; None if the ranks have yet to agree on it.
        local_delivery_s: Seconds that the host itself takes to deliver a message, as measured before the run.
    """

    number: int
    ranks: tuple[int, ...]
    first_step: int
    durable: int
    plans: tuple[NewPlan, ...]
    store_prefix: str
    origin_s: float | None = None
    local_delivery_s: float = 0.0

    @classmethod
    def of_run(cls, plan: Plan, ranks: int, first_step: int, steps: int, store_prefix: str) -> "SessionSpec":
        """Return with what a run of steps ``first_step`` to ``steps - 1`` begins: a plan, until one can be decided."""
        plans = (NewPlan(plan),) * min(DECISION_LAG_STEPS, steps - first_step)
        return cls(0, tuple(range(ranks)), first_step, first_step, plans, store_prefix)

    def to_data(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {**plain, "plans": [each.to_data() for each in self.plans]}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "SessionSpec":
        """Return what `to_data` gave; more entries are ignored."""
        plain = {name: data[name] for name in cls.__slots__}
        plans = tuple(NewPlan.from_data(each) for each in data["plans"])
        return cls(**{**plain, "ranks": tuple(data["ranks"]), "plans": plans})


def pack(events: list[Event], loss: float | None, kept: int | None) -> dict[str, Any]:
    """Return what a rank publishes of a step: rows, its part of the loss, and up to which step its copies reach."""
    rows = [[getattr(event, name) for name in Event.__slots__] for event in events]
    return {"rows": rows, "loss": loss, "kept": kept}


def unpack(rows: list[list[Any]], devices: Collection[str]) -> list[Event]:
    """Return the events of what a rank has published.

    Raises:
        ValueError: An event is none, or is of a device that the job does not have.
    """
    events = [Event(EventKind(kind), *rest) for kind, *rest in rows]
    for event in events:
        if event.device not in devices or (event.peer and event.peer not in devices):
            raise ValueError(f"an event of '{event.device}' and '{event.peer}', which the job does not have")
    return events
