"""What the ranks of a job are told: the plan of a step, and with what a generation of ranks begins."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from planner.adapt.migration import LayerTransfer
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.events.event import Event, EventKind
from planner.files.plan import parse_plan, plan_json
from planner.plan.plan import Plan

# What may stand in a plan's place.
ENDED, FINISHED = "ended", "finished"


@dataclass(frozen=True, slots=True)
class NewPlan:
    """What steps run from some step on.

    Attributes:
        plan: Each of them.
        moves: What travels before the first of them; None where everybody keeps what it was set up with.
        joins: Whether devices have a part in them that the generation does not have: all finish the step before, and
            connect anew together with those.
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
    """Where a set-up ends.

    Attributes:
        step: The first one for which everything is set up anew.
        to: What it runs, and what moves before it.
        ready_s: When this rank knew, if it had to wait for that, run seconds.
    """

    step: int
    to: NewPlan
    ready_s: float


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """With what a generation begins: ranks that are connected with each other until one of them is lost.

    Attributes:
        generation: Counts from 0.
        ranks: Those of the job that belong to it, in the order of their ranks within it.
        first: The step with which it begins; the parameters are those before this step.
        durable: The newest step of which everybody is known to have complete copies: from it all could begin anew.
        plans: Of this step and those after it, as far as they are known. What moves before the first of them is the
            state of layers that ranks do not have as it was before that step.
    """

    generation: int
    ranks: tuple[int, ...]
    first: int
    durable: int
    plans: tuple[NewPlan, ...]

    @classmethod
    def of_run(cls, plan: Plan, ranks: int, first: int, steps: int) -> "SessionSpec":
        """Return with what a run of steps ``first`` to ``steps - 1`` begins: a plan, until one can be decided on."""
        return cls(0, tuple(range(ranks)), first, first, (NewPlan(plan),) * min(DECISION_LAG_STEPS, steps - first))

    def to_text(self) -> str:
        """Return it as JSON."""
        plain = {name: getattr(self, name) for name in ("generation", "ranks", "first", "durable")}
        return json.dumps({**plain, "plans": [each.to_data() for each in self.plans]})

    @classmethod
    def from_text(cls, text: str) -> "SessionSpec":
        """Return what `to_text` gave."""
        data = json.loads(text)
        plans = tuple(NewPlan.from_data(each) for each in data["plans"])
        return cls(data["generation"], tuple(data["ranks"]), data["first"], data["durable"], plans)


def pack(events: list[Event], loss: float | None, kept: int | None) -> dict[str, Any]:
    """Return what a rank publishes of a step: rows, its part of the loss, and up to which step its copies reach."""
    rows = [[getattr(event, name) for name in Event.__slots__] for event in events]
    return {"rows": rows, "loss": loss, "kept": kept}


def unpack(rows: list[list[Any]]) -> list[Event]:
    """Return the events of what was published."""
    return [Event(EventKind(kind), *rest) for kind, *rest in rows]
