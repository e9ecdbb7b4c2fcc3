"""How observations travel to the policy and plans come back, beside the training and never in its way: a rank's part.

The launcher holds the policy, the agent a store that all ranks reach. Each rank writes what happened in a finished step
there, the agent passes it to the launcher (executor/control/coordinator.py), which answers what step k +
`DECISION_LAG_STEPS` runs (executor/control/policy_driver.py). Ranks fetch that in a thread of their own while step k +
1 is still computing.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from executor.core.control_store import (
    beginning_key,
    done_key,
    plan_key,
    reach_control_store,
    report_key,
    telemetry_key,
    trouble_key,
)
from executor.core.messages import ENDED, FINISHED, NewPlan, SessionSpec, pack
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.events.event import UPDATE_ACTION, Event, EventKind


class GenerationEndedError(Exception):
    """A rank is lost, or another one joins: what these have begun together is over, and they will begin anew."""


class PlanFeed:
    """A rank's side in one generation: publishes its events step by step, and knows the plan of the coming steps.

    Args:
        store: Host and port of the job's store.
        rank: Whose events these are.
        beginning: Of the generation.
        steps: Training steps of the run.
        failed: Called from the fetching thread when the store is gone.
        ended: Called from the fetching thread when the generation is over before the run is.
        kept: Gives the step before which this rank's copies of the state are complete; None where it has none to keep.
    """

    def __init__(
        self,
        store: tuple[str, int],
        rank: int,
        beginning: SessionSpec,
        steps: int,
        failed: Callable[[Exception], None],
        ended: Callable[[], None] = lambda: None,
        kept: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._generation = beginning.generation
        self._durable = beginning.durable
        self._steps = steps
        self._failed = failed
        self._ended = ended
        self._kept = kept
        self._plans = dict(enumerate(beginning.plans, beginning.first))
        self._next = beginning.first + len(beginning.plans)
        self._durables: dict[int, int] = {}
        self._known = threading.Condition()
        self._outcome = ""
        self._events: defaultdict[int, list[Event]] = defaultdict(list)
        self._late: list[Event] = []
        self._losses: dict[int, float] = {}
        self._open: defaultdict[int, int] = defaultdict(lambda: 1)
        self._finished = beginning.first - 1
        self._lock = threading.Lock()
        # A client that waits holds its connection: one to write, one to wait.
        self._outbound, self._inbound = (reach_control_store(store) for _ in range(2))
        self._thread = threading.Thread(target=self._fetch, name="plans", daemon=True)
        self._thread.start()

    def log(self, event: Event) -> None:
        """Take an event; that of a send or of a move of layers closes what `sending` opened.

        Updates of other pipelines may be sent and applied when the step that they belong to has long been published.
        They go with the next one; a policy does not see them.
        """
        with self._lock:
            is_late = event.step <= self._finished and event.step not in self._open
            (self._late if is_late else self._events[event.step]).append(event)
        if event.kind in (EventKind.SEND, EventKind.MIGRATE):
            self._close(self._steps - 1 if event.action == UPDATE_ACTION else event.step)

    def sending(self, step: int) -> None:
        """Say that a send, or a move of layers before a step, is under way, which holds this step back."""
        with self._lock:
            self._open[step] += 1

    def release(self, step: int) -> None:
        """Say that what held a step back is over."""
        self._close(step)

    def note_loss(self, step: int, loss: float) -> None:
        """Take this rank's part of a step's loss, before the step is finished."""
        with self._lock:
            self._losses[step] = loss

    def finish(self, step: int) -> None:
        """Say that the rank has done its work of a step; it is published once its sends have left."""
        with self._lock:
            self._open.setdefault(step, 1)
            self._finished = step
        self._close(step)

    def known(self, step: int) -> NewPlan | None:
        """Return the plan of a step if it is there already, with what moves right before that step."""
        with self._known:
            return self._plans.get(step)

    def durable(self, step: int) -> int:
        """Return the step of which, when this step was decided on, everybody had complete copies."""
        with self._known:
            return self._durables.get(step, self._durable)

    def wait(self, step: int) -> NewPlan:
        """Return the plan of a step, waiting for it if need be, with what moves right before that step.

        Raises:
            GenerationEndedError: It will never come.
        """
        with self._known:
            self._known.wait_for(lambda: step in self._plans or self._outcome)
            if step not in self._plans:
                raise GenerationEndedError
            return self._plans[step]

    def outcome(self, patience_s: float | None = None) -> str:
        """Wait until the generation is over; return `FINISHED`, `ENDED`, or nothing after ``patience_s`` seconds."""
        with self._known:
            self._known.wait_for(lambda: self._outcome, patience_s)
            return self._outcome

    def say_trouble(self) -> None:
        """Say that a connection is lost."""
        self._outbound.set(trouble_key(self._generation), str(self._rank))

    def say_done(self) -> None:
        """Say that this rank has done all steps, and written what they left."""
        self._outbound.set(done_key(self._generation, self._rank), "")

    def report(self, copies: Mapping[int, frozenset[int]], now_s: float) -> SessionSpec:
        """Say what this rank has, now that the generation is over; return with what all begin anew.

        Args:
            copies: Step to the layers whose state before it this rank has.
            now_s: Run seconds.
        """
        held = {step: sorted(layers) for step, layers in copies.items()}
        said = {"copies": held, "now_s": now_s, "unpublished": self._unpublished()}
        self._outbound.set(report_key(self._generation, self._rank), json.dumps(said))
        return SessionSpec.from_text(self._outbound.get(beginning_key(self._generation + 1)).decode())

    def _unpublished(self) -> dict[str, Any]:
        """Return what happened in steps that were never published, as it would have been."""
        with self._lock:
            return pack([event for events in self._events.values() for event in events], None, None)

    def close(self) -> None:
        """Wait for the fetching thread, which ends with the generation."""
        self._thread.join()

    def _close(self, step: int) -> None:
        with self._lock:
            self._open[step] -= 1
            if self._open[step]:
                return
            del self._open[step]
            late, self._late = self._late, []
            packed = pack([*self._events.pop(step, []), *late], self._losses.pop(step, None), self._kept())
        self._outbound.set(telemetry_key(self._generation, step, self._rank), json.dumps(packed, separators=(",", ":")))

    def _fetch(self) -> None:
        try:
            for step in range(self._next, self._steps + 1):
                text = self._inbound.get(plan_key(self._generation, step)).decode()
                if text in (ENDED, FINISHED):
                    break
                self._take(step, json.loads(text))
            with self._known:
                self._outcome = text
                self._known.notify_all()
            if text == ENDED:
                self._ended()
        except Exception as error:
            self._failed(error)

    def _take(self, step: int, data: Any) -> None:
        with self._known:
            new = data["new"]
            self._plans[step] = NewPlan(self._plans[step - 1].plan) if new is None else NewPlan.from_data(new)
            self._durables[step] = data["durable"]
            for old in (self._plans, self._durables):
                old.pop(step - DECISION_LAG_STEPS - 1, None)
            self._known.notify_all()
