"""Between the ranks of a job and the launcher's policy: the agent's part.

The ranks publish what happened in a finished step in a store that the agent holds, where they can reach it in whichever
network they are. A thread of the agent passes it to the launcher as a line of JSON, and what comes back, what step
k + `DECISION_LAG_STEPS` runs, to the ranks. Where ranks are lost, this thread ends their generation, finds the newest
step of which those that are left have everything, and lets them begin anew from there: with the plan that the policy
answers, or with the old one when a new process has come for each that is gone.
"""

import json
import math
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, TextIO

from executor import control_store as store_keys
from executor.control_store import open_store
from executor.departed_ranks import DepartedRanks
from executor.job import Orders
from executor.new_plan import Beginning, NewPlan
from executor.plan_feed import ENDED, FINISHED
from executor.regrouping import Copies, missing_layers, newest_complete, restoring_moves
from planner.plan import Plan
from planner.policy import DECISION_LAG_STEPS
from planner.scenario import Scenario
from traces.errors import RunError

_PAUSE_S = 0.002

# Stands for a generation where a process is invited to none.
UNINVITED = -1

# A connection that was lost is a sign that its other end is; if nothing else shows that, all connect anew.
_VERDICT_S = 2.0


class Coordinator:
    """Steers the ranks of a job, in a thread of its own.

    Args:
        host: Where the ranks reach this process.
        scenario: What is trained.
        plan: Of the first step.
        devices: In rank order.
        orders: How they run.
        telemetry: To the launcher, a line for each question.
        answers: From the launcher, a line for each of these.
        departures: Tells which ranks are lost; None where that ends the run.
        failed: Called with the reason if the run cannot go on.
    """

    def __init__(
        self,
        host: str,
        scenario: Scenario,
        plan: Plan,
        devices: Sequence[str],
        orders: Orders,
        telemetry: TextIO,
        answers: TextIO,
        departures: DepartedRanks | None,
        failed: Callable[[str], None],
    ) -> None:
        self._store = open_store(host)
        self._scenario = scenario
        self._devices = devices
        self._steps = orders.steps
        self._telemetry = telemetry
        self._answers = answers
        self._departures = departures
        self._failed = failed
        self._current = Beginning.of_run(plan, len(devices), orders.first_step, orders.steps)
        self._incarnations = dict.fromkeys(self._current.ranks, 0)
        self._lost: set[int] = set()
        self._durable = orders.first_step
        self._thread = threading.Thread(target=self._guarded, name="coordinator", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Of the store."""
        return int(self._store.port)

    def finish(self) -> None:
        """Wait until the launcher has seen all steps."""
        self._thread.join()

    def _guarded(self) -> None:
        try:
            self._await_start()
            while not self._accompany():
                self._regroup()
        except RunError as error:
            self._failed(str(error))
        except Exception as error:
            traceback.print_exc()
            self._failed(f"the coordinator of the ranks failed: {type(error).__name__}: {error}")

    # --- a generation, step by step ---

    def _await_start(self) -> None:
        """Wait until everybody can train: who is lost before that was never there."""
        if self._departures is not None:
            ready = [store_keys.ready_key(rank, 0) for rank in self._current.ranks]
            if self._await(ready) is None:
                names = ", ".join(self._devices[rank] for rank in sorted(self._lost))
                raise RunError(f"the process of {names} was ended before the training began")

    def _accompany(self) -> bool:
        """Pass on what a generation says and hears; return whether it has come to the end."""
        current = self._current
        self._step, told = current.first, current.first + len(current.plans)
        while self._step < self._steps:
            keys = [store_keys.telemetry_key(current.generation, self._step, rank) for rank in current.ranks]
            published = self._await(keys)
            if published is None:
                return False
            parts = [json.loads(each) for each in published]
            # Nobody goes back to before what is said here; what happened in later steps may be lost with a rank.
            kept = [part["kept"] for part in parts if part["kept"] is not None]
            self._durable = max(self._durable, min([self._step + 1, *kept]))
            new = self._ask({"step": self._step, "parts": parts, "away": self._absent(current.ranks)})
            upcoming = self._step + DECISION_LAG_STEPS
            if told <= upcoming < self._steps:
                self._tell(upcoming, json.dumps({"new": new, "durable": self._durable}))
            # Who has published a step has fetched its plan. The first steps' plans are in nobody's key.
            for key in keys if self._step < told else [*keys, self._plan_key(self._step)]:
                self._store.delete_key(key)
            self._step += 1
        return self._end()

    def _end(self) -> bool:
        """Wait until everybody has written down what is left; return whether all did."""
        if self._departures is not None:
            done = [store_keys.done_key(self._current.generation, rank) for rank in self._current.ranks]
            if self._await(done) is None:
                return False
        self._tell(self._steps, FINISHED)
        for rank in self._lost:
            # Its new process is not needed any more.
            self._store.set(store_keys.invitation_key(rank, self._incarnations[rank]), str(UNINVITED))
        return True

    def _absent(self, ranks: Collection[int]) -> list[str]:
        """The devices of all other ranks: nobody takes up again yet who was gone without."""
        return sorted(device for rank, device in enumerate(self._devices) if rank not in ranks)

    def _tell(self, step: int, text: str) -> None:
        self._store.set(self._plan_key(step), text)

    def _plan_key(self, step: int) -> str:
        return store_keys.plan_key(self._current.generation, step)

    def _ask(self, question: dict[str, Any]) -> Any:
        self._telemetry.write(json.dumps(question, separators=(",", ":")) + "\n")
        self._telemetry.flush()
        answer = self._answers.readline()
        if not answer:
            # The launcher is gone, and this process follows it.
            raise RunError("the launcher is gone")
        return json.loads(answer)

    def _await(self, keys: Sequence[str]) -> list[str] | None:
        """What stands under keys when all of them are there; None if a rank of the generation is lost before."""
        if self._departures is None:
            self._store.wait(list(keys), store_keys.PATIENCE)
        trouble = store_keys.trouble_key(self._current.generation)
        since_s = None
        while not self._store.check(list(keys)):
            if self._hear():
                return None
            if self._store.check([trouble]):
                since_s = since_s or time.monotonic()
                if time.monotonic() - since_s > _VERDICT_S:
                    return None
            time.sleep(_PAUSE_S)
        return [self._store.get(key).decode() for key in keys]

    def _hear(self) -> bool:
        """Take note of processes that are gone; return whether one of them belongs to this generation."""
        own = False
        for departure in self._departures.heard() if self._departures is not None else ():
            self._incarnations[departure.rank] = departure.incarnation + 1
            self._lost.add(departure.rank)
            own |= departure.rank in self._current.ranks
        return own

    # --- from one generation to the next ---

    def _regroup(self) -> None:
        """End a generation, and begin another one with those who are left, or with all."""
        before = self._current
        # Ranks wait for one of these.
        first_told = before.first + len(before.plans)
        for step in range(first_told, max(first_told, self._step + DECISION_LAG_STEPS) + 1):
            self._tell(min(step, self._steps), ENDED)
        unpublished = None
        while True:
            reports = self._reports()
            if unpublished is None:
                unpublished = [report["unpublished"] for report in reports.values()]
            begin = self._beginning(reports, unpublished)
            unpublished = []
            # Somebody else may have been lost meanwhile.
            if not self._lost & set(reports):
                break
        self._current, self._durable = begin, begin.first
        self._lost -= set(begin.ranks)
        self._store.set(store_keys.beginning_key(begin.generation), begin.to_text())
        for rank in set(begin.ranks) - set(reports):
            invitation = store_keys.invitation_key(rank, self._incarnations[rank])
            self._store.set(invitation, str(begin.generation))

    def _beginning(self, reports: dict[int, dict[str, Any]], unpublished: list[Any]) -> Beginning:
        """With what those who have reported begin anew, and those for whom they wait."""
        before = self._current
        copies = {self._devices[rank]: _copies(report) for rank, report in reports.items()}
        resumed = self._resumed(copies)
        answer = self._ask(
            {
                "resumed": resumed,
                "gone": sorted(self._devices[rank] for rank in before.ranks if rank not in reports),
                "away": self._absent(reports),
                "parts": unpublished,
                "now_s": max(report["now_s"] for report in reports.values()),
            }
        )
        plans = [NewPlan.from_data(each) for each in answer["plans"]][: self._steps - resumed]
        plan, joining = plans[0].plan, list[int]()
        if answer["waits"]:
            joining = [r for r in before.ranks if r not in reports and self._devices[r] in plan.devices]
            self._await_processes(joining)
            copies |= {self._devices[rank]: {} for rank in joining}
        plans[0] = NewPlan(plan, restoring_moves(plan, self._scenario, resumed, copies).moves)
        ranks = tuple(rank for rank in before.ranks if rank in reports or rank in joining)
        return Beginning(before.generation + 1, ranks, resumed, tuple(plans))

    def _reports(self) -> dict[int, dict[str, Any]]:
        """What the ranks that are left say, by rank; of more that are lost meanwhile nothing."""
        while True:
            self._hear()
            left = [rank for rank in self._current.ranks if rank not in self._lost]
            keys = [store_keys.report_key(self._current.generation, rank) for rank in left]
            if not left:
                raise RunError("all ranks are lost")
            if self._store.check(keys):
                return {rank: json.loads(self._store.get(key)) for rank, key in zip(left, keys, strict=True)}
            time.sleep(_PAUSE_S)

    def _resumed(self, copies: dict[str, Copies]) -> int:
        layers = len(self._scenario.model.layers)
        resumed = newest_complete(copies.values(), layers, self._step)
        if resumed is None:
            missing = ", ".join(map(str, missing_layers(copies.values(), layers, self._step)))
            lost = ", ".join(self._devices[rank] for rank in sorted(self._lost))
            raise RunError(
                f"with {lost} all copies of the layers {missing} are lost: nobody that is left has their state"
            )
        return resumed

    def _await_processes(self, ranks: Sequence[int]) -> None:
        """Wait for a new process of each of these ranks."""
        while not all(self._has_returned(rank) for rank in ranks):
            self._hear()
            time.sleep(_PAUSE_S)

    def _has_returned(self, rank: int) -> bool:
        ready = store_keys.ready_key(rank, self._incarnations[rank])
        assert self._departures is not None
        until_s = self._departures.away_until_s(rank)
        if until_s == math.inf:
            raise RunError(f"device '{self._devices[rank]}' never returns, and no policy goes on without it")
        return until_s is None and self._store.check([ready])


def _copies(report: dict[str, Any]) -> Copies:
    return {int(step): frozenset(layers) for step, layers in report["copies"].items()}
