"""How observations travel to the policy and plans come back, beside the training and never in its way.

The launcher holds the policy, the agent a store that all ranks reach. Each rank writes the events of a finished step
there, the agent passes them to the launcher (executor/bridge.py), which shows them to the policy and answers what
step k + `DECISION_LAG_STEPS` runs. Ranks fetch that in a thread of their own while step k + 1 is still computing.
"""

import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from planner.adaptation import Adaptation
from planner.events import Event, EventKind
from planner.files.plan_file import parse_plan, plan_json
from planner.plan import Plan
from planner.policy import DECISION_LAG_STEPS

# A rank waits this long for a plan before it gives up; the launcher ends all ranks long before if it is gone.
PATIENCE = timedelta(hours=1)

_SAME_PLAN = "same"

# Says to the ranks where the store is: HOST:PORT.
_ADDRESS = "ROPEBRIDGE_STORE"


def announce_store(host: str, port: int) -> None:
    """Tell the processes that this one starts where the store of their job is."""
    os.environ[_ADDRESS] = f"{host}:{port}"


def store_address() -> tuple[str, int]:
    """Return host and port of the store of this rank's job."""
    host, _, port = os.environ[_ADDRESS].rpartition(":")
    return host, int(port)


class Controller:
    """The launcher's side: asked once for each step.

    Args:
        adaptation: Holds the policy.
        settle: Makes the rows of all ranks into those of a step.
    """

    def __init__(self, adaptation: Adaptation, settle: Callable[[Iterable[Event]], list[Event]]) -> None:
        self._adaptation = adaptation
        self._settle = settle
        self._step = 0
        self.decision_events: list[Event] = []

    def answer(self, telemetry: str) -> str:
        """Return what the step after next runs, given what the next step's ranks have published; both are JSON."""
        events = self._settle(event for rows in json.loads(telemetry) for event in _unpack(rows))
        decision = self._adaptation.finish_step(self._step, events)
        if decision is not None:
            now_s = max(event.end_s for event in events)
            self.decision_events.append(Event(EventKind.DECISION, "", "", -1, -1, -1, self._step, "", now_s, now_s, 0))
        self._step += 1
        return json.dumps(_SAME_PLAN if decision is None else plan_json(decision.plan))


class PlanFeed:
    """A rank's side: publishes its events step by step, and knows the plan of the coming steps.

    Args:
        store: Host and port of the job's store.
        rank: Whose events these are.
        plan: What the first steps run.
        steps: Training steps.
        failed: Called from the fetching thread when the store is gone.
    """

    def __init__(
        self, store: tuple[str, int], rank: int, plan: Plan, steps: int, failed: Callable[[Exception], None]
    ) -> None:
        self._rank = rank
        self._steps = steps
        self._failed = failed
        self._plans = dict.fromkeys(range(min(steps, DECISION_LAG_STEPS)), plan)
        self._known = threading.Condition()
        self._events: defaultdict[int, list[Event]] = defaultdict(list)
        self._open: defaultdict[int, int] = defaultdict(lambda: 1)
        self._finished = -1
        self._lock = threading.Lock()
        # A client that waits holds its connection: one to write, one to wait.
        self._outbound, self._inbound = (_connect(*store) for _ in range(2))
        self._thread = threading.Thread(target=self._fetch, daemon=True)
        self._thread.start()

    def log(self, event: Event) -> None:
        """Take an event; a send closes what `sending` opened.

        An update of another pipeline may be applied when the step that it belongs to has long been published: a policy
        does not see that.
        """
        with self._lock:
            if event.step > self._finished or event.step in self._open:
                self._events[event.step].append(event)
        if event.kind is EventKind.SEND:
            self._close(event.step)

    def sending(self, step: int) -> None:
        """Say that a send of this step is under way."""
        with self._lock:
            self._open[step] += 1

    def finish(self, step: int) -> None:
        """Say that the rank has done its work of a step; it is published once its sends have left."""
        with self._lock:
            self._open.setdefault(step, 1)
            self._finished = step
        self._close(step)

    def known(self, step: int) -> Plan | None:
        """Return the plan of a step if it is there already."""
        with self._known:
            return self._plans.get(step)

    def wait(self, step: int) -> Plan:
        """Return the plan of a step, waiting for it if need be."""
        with self._known:
            self._known.wait_for(lambda: step in self._plans)
            return self._plans[step]

    def _close(self, step: int) -> None:
        with self._lock:
            self._open[step] -= 1
            if self._open[step]:
                return
            del self._open[step]
            packed = _pack(self._events.pop(step, []))
        self._outbound.set(telemetry_key(step, self._rank), packed)

    def _fetch(self) -> None:
        try:
            for step in range(DECISION_LAG_STEPS, self._steps):
                text = self._inbound.get(plan_key(step)).decode()
                with self._known:
                    self._plans[step] = self._plans[step - 1] if text == _SAME_PLAN else parse_plan(text)
                    self._plans.pop(step - DECISION_LAG_STEPS - 1, None)
                    self._known.notify_all()
        except Exception as error:
            self._failed(error)


def _connect(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=PATIENCE)


def telemetry_key(step: int, rank: int) -> str:
    """Return where a rank publishes the events of a step."""
    return f"events/{step}/{rank}"


def plan_key(step: int) -> str:
    """Return where the ranks find the plan of a step."""
    return f"plan/{step}"


def _pack(events: list[Event]) -> str:
    return json.dumps([[getattr(event, name) for name in Event.__slots__] for event in events], separators=(",", ":"))


def _unpack(rows: list[list[Any]]) -> list[Event]:
    return [Event(EventKind(kind), *rest) for kind, *rest in rows]
