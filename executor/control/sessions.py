"""A session as its ranks tell of it, and with what the next one begins."""

import math
import secrets
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executor.control.policy_driver import PolicyDriver
from executor.control.processes import RankProcesses
from executor.core.control_channel import Message
from executor.core.messages import NewPlan, SessionSpec
from executor.core.timeouts import timeouts
from executor.recovery.backups import missing_layers, newest_complete, restoring_moves
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import RunError


class SessionProgress:
    """A session that is under way, as its ranks tell of it.

    Attributes:
        spec: With what it has begun.
        step: The first step that not all of its ranks have published.
        durable: The newest step of which every rank is known to have complete copies.
        publications: How many steps each rank has published.
        reports: What ranks have said after the end of the session.
        done: Ranks that have done all steps and written what they leave.
        trouble_due_s: When a lost connection ends the session, by the monotonic clock; infinity if none is lost.
    """

    def __init__(self, spec: SessionSpec) -> None:
        self.spec = spec
        self.step = spec.first_step
        self.durable = spec.durable
        self.publications: defaultdict[int, int] = defaultdict(int)
        self.reports: dict[int, dict[str, Any]] = {}
        self.done: set[int] = set()
        self.trouble_due_s = math.inf
        self._published: defaultdict[int, dict[int, dict[str, Any]]] = defaultdict(dict)

    def hear(self, rank: int, message: Message) -> None:
        """Take what a rank says of the session; what it says of one before is ignored."""
        kind = message["kind"]
        if message.get("session") != self.spec.number:
            return
        if kind == "step":
            self._published[int(message["step"])][rank] = message["part"]
            self.publications[rank] += 1
        elif kind == "trouble":
            self.trouble_due_s = min(self.trouble_due_s, time.monotonic() + timeouts().trouble_s)
        elif kind == "report":
            self.reports[rank] = message
        elif kind == "done":
            self.done.add(rank)

    @property
    def is_published(self) -> bool:
        """Whether all ranks have published the step."""
        return len(self._published[self.step]) == len(self.spec.ranks)

    def finish_step(self) -> list[dict[str, Any]]:
        """Return what the ranks have published of the step, in their order, and go on to the next one."""
        published = self._published.pop(self.step)
        parts = [published[rank] for rank in self.spec.ranks]
        self.step += 1
        # No rank goes back to before what is said here; what happened in later steps may be lost with a rank.
        self.durable = max(
            self.durable, min([self.step, *(part["kept"] for part in parts if part["kept"] is not None)])
        )
        return parts


@dataclass(eq=False)
class Regrouping:
    """Finds with what the next session of a job begins, and of which plans it hears.

    Attributes:
        steps: Number of training steps of the run.
        devices: The names of the devices in rank order.
        joining: The step before which ranks join that the session does not have, and which.
    """

    scenario: Scenario
    steps: int
    devices: Sequence[str]
    processes: RankProcesses
    driver: PolicyDriver | None
    joining: tuple[int, frozenset[int]] | None = None

    def next_session(
        self,
        last: SessionProgress,
        reports: Mapping[int, dict[str, Any]],
        unpublished: list[Any],
        joining: tuple[int, frozenset[int]] | None,
        local_delivery_s: float,
    ) -> SessionSpec:
        """Return with what those who have reported begin again, together with those who join or for whom they wait.

        Raises:
            RunError: The state of some layers is lost.
        """
        assert self.driver is not None
        processes = self.processes
        layers = len(self.scenario.model.layers)
        copies = {
            self.devices[rank]: {int(step): frozenset(held) for step, held in report["copies"].items()}
            for rank, report in reports.items()
        }
        resumed = newest_complete(copies.values(), layers, last.step)
        if resumed is None:
            missing = ", ".join(map(str, missing_layers(copies.values(), layers, last.step)))
            lost = ", ".join(self.devices[rank] for rank in sorted(processes.lost))
            raise RunError(
                f"with {lost} all copies of the layers {missing} are lost: nobody that is left has their state"
            )
        gone = {rank for rank in last.spec.ranks if rank not in reports}
        if joining is not None and joining[0] == resumed:
            gone |= {rank for rank in joining[1] if not processes.has_returned(rank)}
        names = sorted(self.devices[rank] for rank in gone)
        away = sorted({*names, *processes.absent(reports)})
        now_s = max(float(report["now_s"]) for report in reports.values())
        plans = self.driver.lose_devices(resumed, names, away, unpublished, now_s)[: self.steps - resumed]
        plan = plans[0].plan
        others = self._beyond(plan, reports)
        copies |= {self.devices[rank]: {} for rank in others}
        plans[0] = NewPlan(plan, restoring_moves(plan, self.scenario, resumed, copies).moves)
        ranks = tuple(sorted({*reports, *others}))
        # Those who join begin with layers of which nobody has a second copy yet: older ones are kept until then.
        durable, told = min(last.durable, resumed), self.until_others_join(plans, resumed, ranks)
        number, origin_s = last.spec.number + 1, processes.origin_s
        return SessionSpec(number, ranks, resumed, durable, told, random_token(), origin_s, local_delivery_s)

    def until_others_join(self, plans: Sequence[NewPlan], first: int, ranks: Collection[int]) -> tuple[NewPlan, ...]:
        """Return those of the plans of steps from ``first`` on that a session of these ranks hears of."""
        self.joining = None
        for step, new in enumerate(plans, first):
            if beyond := self._beyond(new.plan, ranks):
                self.joining = (step, beyond)
                return (*plans[: step - first], replace(new, joins=True))
        return tuple(plans)

    def _beyond(self, plan: Plan, ranks: Collection[int]) -> frozenset[int]:
        """Return the ranks that a plan has besides these."""
        return frozenset(map(self.devices.index, plan.devices)) - frozenset(ranks)


def random_token() -> str:
    """Return a name that nothing else has."""
    return secrets.token_hex(8)
