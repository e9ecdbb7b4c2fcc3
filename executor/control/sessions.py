"""The progress of a session, known from its ranks' messages, and the specification of the next session."""

import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executor.control.policy_driver import PolicyDriver
from executor.control.processes import RankProcesses
from executor.core.control_channel import Message
from executor.core.messages import NewPlan, SessionSpec
from executor.core.timeouts import timeouts
from planner.adapt.copies import missing_layers, restoring_moves, resumable_step
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import RunError


class SessionProgress:
    """The progress of the current session, known from the messages of its ranks.

    Args:
        spec: The specification of the session.
        reached: The first step that is not finished: later than the session's first one if this process follows the
            session in place of another one.

    Attributes:
        step: The first step that some of the ranks have not published.
        durable: The newest step before which copies of all layers are known to be complete.
        publications: How many steps each rank has published.
        reports: The messages ``report`` after the end of the session, by rank.
        copied: Ranks that have copied their state before the step with which others join.
        done: Ranks that have done all steps and written their results.
        trouble_due_s: Monotonic time at which a lost connection ends the session; infinity if none is lost.
    """

    def __init__(self, spec: SessionSpec, reached: int) -> None:
        self.spec = spec
        self.step = reached
        self.durable = spec.durable
        self.publications: defaultdict[int, int] = defaultdict(lambda: reached - spec.first_step)
        self.reports: dict[int, dict[str, Any]] = {}
        self.copied: set[int] = set()
        self.done: set[int] = set()
        self.trouble_due_s = math.inf
        self._published: defaultdict[int, dict[int, dict[str, Any]]] = defaultdict(dict)

    def hear(self, rank: int, message: Message) -> None:
        """Handle a rank's message about the session; messages about earlier sessions are ignored."""
        kind = message["kind"]
        if message.get("session") != self.spec.number:
            return
        if kind == "step":
            step = int(message["step"])
            # A rank that connects again sends again what may have been lost.
            if step >= self.step and rank not in self._published[step]:
                self._published[step][rank] = message["part"]
                self.publications[rank] += 1
        elif kind == "trouble":
            self.trouble_due_s = min(self.trouble_due_s, time.monotonic() + timeouts().trouble_s)
        elif kind == "report":
            self.reports[rank] = message
        elif kind == "copied":
            self.copied.add(rank)
        elif kind == "done":
            self.done.add(rank)

    @property
    def is_published(self) -> bool:
        """Whether all ranks have published `step`."""
        return len(self._published[self.step]) == len(self.spec.ranks)

    @property
    def incomplete(self) -> list[dict[str, Any]]:
        """What ranks have published of the steps that not all ranks have published."""
        return [part for _, published in sorted(self._published.items()) for part in published.values()]

    def finish_step(self) -> list[dict[str, Any]]:
        """Return the ranks' publications of `step`, in rank order, and advance to the next step."""
        published = self._published.pop(self.step)
        parts = [published[rank] for rank in self.spec.ranks]
        self.step += 1
        # At most `step`, since a later session may repeat steps that not all ranks have published.
        self.durable = max(
            self.durable, min([self.step, *(part["kept"] for part in parts if part["kept"] is not None)])
        )
        return parts


@dataclass(eq=False)
class Regrouping:
    """Specifies the next session of a job, and decides which plans a session receives.

    Attributes:
        first_step: Number of the run's first step.
        steps: Number of the step after the last one.
        devices: The names of the devices in rank order.
        driver: Calls the policy; None in a job whose ranks receive no messages while they run.
        joining: The step before which ranks outside the session join, and these ranks; None if no ranks join.
    """

    scenario: Scenario
    first_step: int
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
        copied_with: Callable[[int], Plan],
        local_delivery_s: float,
    ) -> SessionSpec:
        """Return the specification of the next session: the ranks that have reported, and all others its plan needs.

        ``reports`` are the messages of the remaining ranks; ``unpublished`` has the rows of unfinished steps.
        ``copied_with`` is what `plans_of_copies` has returned.

        Raises:
            RunError: No complete copies of the layers are left.
        """
        assert self.driver is not None
        processes = self.processes
        layers = len(self.scenario.model.layers)
        copies = {
            self.devices[rank]: {int(step): frozenset(held) for step, held in report["copies"].items()}
            for rank, report in reports.items()
        }
        separate = copied_with(last.step).synchronisation.has_outer_step
        resumed = resumable_step(copies, copied_with, layers, last.step)
        if resumed is None and separate:
            raise RunError(
                f"lost devices {self._lost}: of some layer no first replica of a stage is left, so the run cannot "
                "continue; a run with '--checkpoint' can be resumed"
            )
        if resumed is None:
            missing = ", ".join(map(str, missing_layers(copies.values(), layers, last.step)))
            raise RunError(
                f"lost devices {self._lost}: no remaining device has a copy of the layers {missing}, so the run cannot "
                "continue; a run with '--checkpoint' can be resumed"
            )
        gone = {rank for rank in last.spec.ranks if rank not in reports}
        if joining is not None and joining[0] == resumed:
            gone |= {rank for rank in joining[1] if not processes.has_returned(rank)}
        names = sorted(self.devices[rank] for rank in gone)
        away = sorted({*names, *processes.absent(reports)})
        now_s = max(float(report["now_s"]) for report in reports.values())
        before = copied_with(resumed)
        plans = self.driver.lose_devices(resumed, names, away, unpublished, now_s)[: self.steps - resumed]
        plan = plans[0].plan
        others = self._beyond(plan, reports)
        # A new process has the state before the first step, with which it would have begun the run.
        first = {self.first_step: frozenset(range(layers))} if separate else {}
        copies |= {self.devices[rank]: first for rank in others}
        plans[0] = replace(plans[0], moves=restoring_moves(plan, self.scenario, resumed, copies, before).moves)
        ranks = tuple(sorted({*reports, *others}))
        # Layers of joining ranks have no second copy yet; `durable` keeps the older copies until they have.
        durable, told = min(last.durable, resumed), self.until_others_join(plans, resumed, ranks)
        number, origin_s = last.spec.number + 1, processes.origin_s
        return SessionSpec(number, ranks, resumed, durable, told, random_token(), origin_s, local_delivery_s)

    def until_others_join(self, plans: Sequence[NewPlan], first: int, ranks: Collection[int]) -> tuple[NewPlan, ...]:
        """Return the plans that a session of ``ranks`` receives: all up to the first that needs further ranks.

        That plan is marked with `NewPlan.joins`, and `joining` is set. ``first`` is the step of the first plan.
        """
        self.joining = None
        for step, new in enumerate(plans, first):
            if beyond := self._beyond(new.plan, ranks):
                self.joining = (step, beyond)
                return (*plans[: step - first], replace(new, joins=True))
        return tuple(plans)

    def plans_of_copies(self) -> Callable[[int], Plan]:
        """Return a function that returns the plan with which ranks have copied their layers before a step.

        Before the step with which others join, that is the plan of the step before. Plans that are decided later
        change nothing.
        """
        assert self.driver is not None
        plan_at, joined = self.driver.present_plans(), -1 if self.joining is None else self.joining[0]
        return lambda step: plan_at(step - (step == joined))

    @property
    def _lost(self) -> str:
        return ", ".join(self.devices[rank] for rank in sorted(self.processes.lost))

    def _beyond(self, plan: Plan, ranks: Collection[int]) -> frozenset[int]:
        """Return the ranks of a plan that are not among ``ranks``."""
        return frozenset(map(self.devices.index, plan.devices)) - frozenset(ranks)


def random_token() -> str:
    """Return a random name of 16 hexadecimal digits."""
    return secrets.token_hex(8)
