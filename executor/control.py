"""How observations travel to the policy and plans come back, beside the training and never in its way.

The launcher holds the store and the policy. Each rank writes the events of a finished step there; the launcher
shows them to the policy and writes what step k + `DECISION_LAG_STEPS` runs. Ranks fetch that in a thread of
their own while step k + 1 is still computing.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from planner.adaptation import Adaptation
from planner.events import Event, EventKind
from planner.files.plan_file import parse_plan, plan_json
from planner.plan import Plan
from planner.policy import DECISION_LAG_STEPS

# A rank waits this long for a plan before it gives up; the launcher ends all ranks long before if it is gone.
PATIENCE = timedelta(hours=1)

_SAME_PLAN = "same"


def open_store() -> TCPStore:
    """Return the launcher's store, on a free port of this machine."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)


class Controller:
    """The launcher's side: called again and again while the job runs."""

    def __init__(self, store: TCPStore, adaptation: Adaptation, ranks: int) -> None:
        self._store = store
        self._adaptation = adaptation
        self._ranks = ranks
        self._step = 0
        self.decision_events: list[Event] = []

    def poll(self) -> None:
        """Decide on every step that all ranks have finished."""
        while self._store.check(keys := [_telemetry_key(self._step, rank) for rank in range(self._ranks)]):
            events = [event for key in keys for event in _unpack(self._store.get(key))]
            decision = self._adaptation.finish_step(self._step, events)
            text = _SAME_PLAN if decision is None else plan_json(decision.plan)
            self._store.set(_plan_key(self._step + DECISION_LAG_STEPS), text)
            if decision is not None:
                now_s = max(event.end_s for event in events)
                self.decision_events.append(
                    Event(EventKind.DECISION, "", "", -1, -1, -1, self._step, "", now_s, now_s, 0)
                )
            for key in keys:
                self._store.delete_key(key)
            self._step += 1


class PlanFeed:
    """A rank's side: publishes its events step by step, and knows the plan of the coming steps."""

    def __init__(self, port: int, rank: int, plan: Plan, steps: int, failed: Callable[[Exception], None]) -> None:
        self._rank = rank
        self._steps = steps
        self._failed = failed
        self._plans = dict.fromkeys(range(min(steps, DECISION_LAG_STEPS)), plan)
        self._known = threading.Condition()
        self._events: defaultdict[int, list[Event]] = defaultdict(list)
        self._open: defaultdict[int, int] = defaultdict(lambda: 1)
        self._lock = threading.Lock()
        # A client that waits holds its connection: one to write, one to wait.
        self._outbound, self._inbound = (_connect(port) for _ in range(2))
        self._thread = threading.Thread(target=self._fetch, daemon=True)
        self._thread.start()

    def log(self, event: Event) -> None:
        """Take an event; a send closes what `sending` opened."""
        with self._lock:
            self._events[event.step].append(event)
        if event.kind is EventKind.SEND:
            self._close(event.step)

    def sending(self, step: int) -> None:
        """Say that a send of this step is under way."""
        with self._lock:
            self._open[step] += 1

    def finish(self, step: int) -> None:
        """Say that the rank has done its work of a step; it is published once its sends have left."""
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
        self._outbound.set(_telemetry_key(step, self._rank), packed)

    def _fetch(self) -> None:
        try:
            for step in range(DECISION_LAG_STEPS, self._steps):
                text = self._inbound.get(_plan_key(step)).decode()
                with self._known:
                    self._plans[step] = self._plans[step - 1] if text == _SAME_PLAN else parse_plan(text)
                    self._plans.pop(step - DECISION_LAG_STEPS - 1, None)
                    self._known.notify_all()
        except Exception as error:
            self._failed(error)


def _connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)


def _telemetry_key(step: int, rank: int) -> str:
    return f"events/{step}/{rank}"


def _plan_key(step: int) -> str:
    return f"plan/{step}"


def _pack(events: list[Event]) -> str:
    return json.dumps([[getattr(event, name) for name in Event.__slots__] for event in events], separators=(",", ":"))


def _unpack(packed: bytes) -> list[Event]:
    return [Event(EventKind(kind), *rest) for kind, *rest in json.loads(packed)]
