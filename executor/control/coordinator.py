"""Between the ranks of a job and the launcher's policy: the agent's part.

The ranks publish what happened in a finished step in a store that the agent holds, where they can reach it in whichever
network they are. A thread of the agent passes it to the launcher as a line of JSON, and what comes back, what step
k + `DECISION_LAG_STEPS` runs, to the ranks. Where ranks are lost, this thread ends their generation, finds the newest
step of which those that are left have everything, and lets them begin anew from there: with the plan that the policy
answers, or with the old one when a new process has come for each that is gone. Where the policy takes up a device that
has come back, their generation ends with the step before, and the next one has that device's process too.
"""

import json
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TextIO

from torch.distributed import DistStoreError

from executor.control.agent_server import AgentServer
from executor.control.rank_processes import RankProcesses
from executor.core import control_store as store_keys
from executor.core.control_store import open_store
from executor.core.job import RunConfig
from executor.core.messages import ENDED, FINISHED, NewPlan, SessionSpec
from executor.recovery.restore_point import Copies, missing_layers, newest_complete, restoring_moves
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import RunError

_PAUSE_S = 0.002

# A connection that was lost is a sign that its other end is; if nothing else shows that, all connect anew.
_VERDICT_S = 2.0


class Coordinator:
    """Steers the ranks of a job, in a thread of its own.

    Args:
        address: Where the ranks reach the store, host and port; port 0 for any.
        scenario: What is trained.
        plan: Of the first step.
        devices: In rank order.
        orders: How they run.
        telemetry: To the launcher, a line for each question.
        answers: From the launcher, a line for each of these.
        keepers: Tell which ranks are lost; None where that ends the run.
        failed: Called with the reason if the run cannot go on.
    """

    def __init__(
        self,
        address: tuple[str, int],
        scenario: Scenario,
        plan: Plan,
        devices: Sequence[str],
        orders: RunConfig,
        telemetry: TextIO,
        answers: TextIO,
        keepers: AgentServer | None,
        failed: Callable[[str], None],
    ) -> None:
        self._store = open_store(address)
        self._scenario = scenario
        self._devices = devices
        self._steps = orders.steps
        self._telemetry = telemetry
        self._answers = answers
        self._processes = RankProcesses(self._store, devices, keepers)
        self._failed = failed
        self._current = SessionSpec.of_run(plan, len(devices), orders.first_step, orders.steps)
        # The step before which processes join that the generation does not have, and which.
        self._joining: tuple[int, frozenset[int]] | None = None
        self._durable = orders.first_step
        self._thread = threading.Thread(target=self._guarded, name="coordinator", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Of the store."""
        return int(self._store.port)

    def finish(self) -> tuple[int, ...]:
        """Wait until the launcher has seen all steps; return the ranks that have done the last one."""
        self._thread.join()
        return self._current.ranks

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
        if self._processes.are_replaced:
            ready = [store_keys.ready_key(rank, 0) for rank in self._current.ranks]
            if self._await(ready) is None:
                raise RunError(f"the process of {self._processes.lost_names} was ended before the training began")

    def _accompany(self) -> bool:
        """Pass on what a generation says and hears; return whether it has come to the end."""
        current = self._current
        self._step, told = current.first, current.first + len(current.plans)
        while self._step < self._steps:
            if self._others_join_now():
                return False
            keys = [store_keys.telemetry_key(current.generation, self._step, rank) for rank in current.ranks]
            published = self._await(keys)
            if published is None:
                return False
            parts = [json.loads(each) for each in published]
            # Nobody goes back to before what is said here; what happened in later steps may be lost with a rank.
            kept = [part["kept"] for part in parts if part["kept"] is not None]
            self._durable = max(self._durable, min([self._step + 1, *kept]))
            # Whether those are still there who are about to join is asked when they do.
            there = {*current.ranks, *(self._joining[1] if self._joining is not None else ())}
            new = self._ask({"step": self._step, "parts": parts, "away": self._processes.absent(there)})
            upcoming = self._step + DECISION_LAG_STEPS
            if told <= upcoming < self._steps and self._joining is None:
                if new is not None:
                    (told_plan,) = self._until_others_join([NewPlan.from_data(new)], upcoming, current.ranks)
                    new = told_plan.to_data()
                self._tell(upcoming, json.dumps({"new": new, "durable": self._durable}))
            # Who has published a step has fetched its plan. The first steps' plans are in nobody's key.
            for key in keys if self._step < told else [*keys, self._plan_key(self._step)]:
                self._store.delete_key(key)
            self._step += 1
        return self._end()

    def _end(self) -> bool:
        """Wait until everybody has written down what is left; return whether all did."""
        if self._processes.are_replaced:
            done = [store_keys.done_key(self._current.generation, rank) for rank in self._current.ranks]
            if self._await(done) is None:
                return False
            # For processes that wait and are not needed any more.
            self._store.set(store_keys.OVER, "")
        self._tell(self._steps, FINISHED)
        return True

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
        if not self._processes.are_replaced:
            while not self._store.check(list(keys)):
                # It gives up after a while, and machines may take longer to come, or steps to end.
                with suppress(DistStoreError):
                    self._store.wait(list(keys), store_keys.STORE_TIMEOUT)
        trouble = store_keys.trouble_key(self._current.generation)
        since_s = None
        while not self._store.check(list(keys)):
            if self._processes.hear() & set(self._current.ranks):
                return None
            if self._store.check([trouble]):
                since_s = since_s or time.monotonic()
                if time.monotonic() - since_s > _VERDICT_S:
                    return None
            time.sleep(_PAUSE_S)
        return [self._store.get(key).decode() for key in keys]

    # --- from one generation to the next ---

    def _regroup(self) -> None:
        """End a generation, and begin another one with those who are left, or with all."""
        self._end_generation()
        joining, unpublished = self._joining, None
        while True:
            reports = self._reports()
            if unpublished is None:
                unpublished = [report["unpublished"] for report in reports.values()]
            begin = self._beginning(reports, unpublished, joining)
            unpublished = []
            # Somebody else may have been lost meanwhile.
            if not self._processes.lost & set(reports):
                break
        self._current, self._durable = begin, begin.durable
        self._processes.take_in(begin.ranks)
        self._store.set(store_keys.beginning_key(begin.generation), begin.to_text())
        self._processes.invite(set(begin.ranks) - set(reports), begin.generation)

    def _end_generation(self) -> None:
        """Say that it is over where ranks wait for a plan."""
        if self._others_join_now():
            # Whoever has yet to fetch the plan of this step learns from it that others join.
            self._tell(self._step + 1, ENDED)
            return
        first_told = self._current.first + len(self._current.plans)
        for step in range(first_told, max(first_told, self._step + DECISION_LAG_STEPS) + 1):
            self._tell(min(step, self._steps), ENDED)

    def _others_join_now(self) -> bool:
        """Whether all steps are done before the one that has others join."""
        return self._joining is not None and self._joining[0] == self._step

    def _beginning(
        self, reports: dict[int, dict[str, Any]], unpublished: list[Any], joining: tuple[int, frozenset[int]] | None
    ) -> SessionSpec:
        """With what those who have reported begin anew, and those who join or for whom they wait."""
        before = self._current
        copies = {self._devices[rank]: _copies(report) for rank, report in reports.items()}
        resumed = self._resumed(copies)
        gone = {rank for rank in before.ranks if rank not in reports}
        if joining is not None and joining[0] == resumed:
            gone |= {rank for rank in joining[1] if not self._processes.has_returned(rank)}
        names = sorted(self._devices[rank] for rank in gone)
        answer = self._ask(
            {
                "resumed": resumed,
                "gone": names,
                "away": sorted({*names, *self._processes.absent(reports)}),
                "parts": unpublished,
                "now_s": max(report["now_s"] for report in reports.values()),
            }
        )
        plans = [NewPlan.from_data(each) for each in answer["plans"]][: self._steps - resumed]
        plan = plans[0].plan
        others = self._beyond(plan, reports)
        self._processes.await_all(others)
        copies |= {self._devices[rank]: {} for rank in others}
        plans[0] = NewPlan(plan, restoring_moves(plan, self._scenario, resumed, copies).moves)
        ranks = tuple(sorted({*reports, *others}))
        # Those who join begin with layers of which nobody has a second copy yet: older ones are kept until then.
        durable = min(self._durable, resumed)
        told = self._until_others_join(plans, resumed, ranks)
        return SessionSpec(before.generation + 1, ranks, resumed, durable, told)

    def _until_others_join(self, plans: Sequence[NewPlan], first: int, ranks: Collection[int]) -> tuple[NewPlan, ...]:
        """Those of the plans of steps from ``first`` on that a generation hears of."""
        self._joining = None
        for step, new in enumerate(plans, first):
            if beyond := self._beyond(new.plan, ranks):
                self._joining = (step, beyond)
                return (*plans[: step - first], replace(new, joins=True))
        return tuple(plans)

    def _beyond(self, plan: Plan, ranks: Collection[int]) -> frozenset[int]:
        """The ranks that a plan has besides these."""
        return frozenset(map(self._devices.index, plan.devices)) - frozenset(ranks)

    def _reports(self) -> dict[int, dict[str, Any]]:
        """What the ranks that are left say, by rank; of more that are lost meanwhile nothing."""
        while True:
            self._processes.hear()
            left = [rank for rank in self._current.ranks if rank not in self._processes.lost]
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
            raise RunError(
                f"with {self._processes.lost_names} all copies of the layers {missing} are lost: nobody that is left "
                "has their state"
            )
        return resumed


def _copies(report: dict[str, Any]) -> Copies:
    return {int(step): frozenset(layers) for step, layers in report["copies"].items()}
