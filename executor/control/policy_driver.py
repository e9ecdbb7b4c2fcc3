"""Calls the policy of a job after each step and each loss of ranks, and records decisions and absences of devices."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

from executor.control.record.arrivals import LateArrivals, with_arrivals
from executor.control.record.attempt_folder import AttemptFolder
from executor.core.events import EventRecorder
from executor.core.messages import NewPlan, unpack
from planner.adapt.adaptation import Adaptation
from planner.adapt.gradient_noise import GradientNorms, LocalNorms
from planner.adapt.migration import LayerTransfer
from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS, Decision
from planner.adapt.thinking import Thinking
from planner.events.event import ABSENT, UPDATE_ACTION, Event, EventKind, fault_event, is_exchange
from planner.plan.plan import Plan, samples_before
from planner.runs.record import Progress, ProgressCallback


class Absences:
    """Records when devices were absent because their processes were lost, by the scenario's faults or otherwise.

    Args:
        note: Called with the row of each absence that is over.
    """

    def __init__(self, note: Callable[[Event], None]) -> None:
        self._note = note
        self._since_s: dict[str, float] = {}
        self._over: list[Event] = []

    def begin(self, devices: Iterable[str], now_s: float) -> None:
        """Begin an absence at run second ``now_s`` for those of the devices that are not absent yet."""
        for device in devices:
            self._since_s.setdefault(device, now_s)

    def see(self, events: Sequence[Event], away: Collection[str]) -> None:
        """End the absences of devices that are back.

        Args:
            events: The rows of a finished step. An absence ends at the start of the device's first computation.
            away: The devices without a process. Absences of all other devices end at the end of the step.
        """
        if not self._since_s:
            return
        computed = (event for event in events if event.kind is EventKind.COMPUTE and event.device in self._since_s)
        for event in sorted(computed, key=lambda event: event.start_s):
            since_s = self._since_s.pop(event.device, None)
            if since_s is not None:
                self._end(fault_event(event.device, ABSENT, since_s, event.start_s))
        end_s = max((event.end_s for event in events), default=0.0)
        for device in [device for device in self._since_s if device not in away]:
            since_s = self._since_s.pop(device)
            self._end(fault_event(device, ABSENT, since_s, max(since_s, end_s)))

    def _end(self, absence: Event) -> None:
        self._over.append(absence)
        self._note(absence)

    def events(self, end_s: float) -> list[Event]:
        """Return a row for each absence; a device that is still absent is so until the end of the run, ``end_s``."""
        lasting = (fault_event(device, ABSENT, since_s, end_s) for device, since_s in self._since_s.items())
        return [*self._over, *lasting]


class PolicyCall:
    """A call of a policy in a thread, which does not keep the process alive; see `planner.adapt.thinking.Thought`."""

    def __init__(self, propose: Callable[[Observation], Plan | None], seen: Observation) -> None:
        self._is_over = threading.Event()
        self._answer: Plan | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(propose, seen), name="policy", daemon=True).start()

    def is_over(self, until_s: float) -> bool:
        """Wait for the policy until ``until_s``, in seconds of `time.monotonic`; return whether it has answered."""
        return self._is_over.wait(max(0.0, until_s - time.monotonic()))

    def answer(self) -> Plan | None:
        """Return the policy's answer, or raise what the policy raised; wait for it if need be."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        return self._answer

    def _run(self, propose: Callable[[Observation], Plan | None], seen: Observation) -> None:
        try:
            self._answer = propose(seen)
        except BaseException as error:
            self._error = error
        self._is_over.set()


@dataclass(eq=False)
class PolicyDriver:
    """Calls the policy once for each finished step, and whenever ranks are lost.

    After a loss of ranks the job repeats steps that the policy has seen; the policy gets each step only once.

    Args:
        plan: The plan of the first step.
        first_step: Number of the run's first step.
        first_sample: Samples of all steps before the first one.
        devices: The names of the devices that rows may come from.
        adaptation: Calls the policy; None without a policy.
        check: Called with a decision; raises if the ranks cannot carry it out.
        rows: Records the rows of all steps, of repeated ones too; None if the ranks write their rows themselves.
        attempt: Where losses, norms and decisions are kept as the run goes on; None in a job without checkpoints.
        watch: Called with the progress of each finished step, in order and once per step.
        tell: Called with a line for the user when devices are lost.
        steps: Number of the step after the last one.

    Attributes:
        losses: The training loss of each finished step, by its number.
        norms: The gradient norms of each finished step in which they were measured, by its number.
    """

    plan: InitVar[Plan]
    first_step: InitVar[int]
    _first_sample: int
    _devices: Collection[str]
    _adaptation: Adaptation | None
    _check: Callable[[Decision], None]
    _rows: EventRecorder | None
    _attempt: AttemptFolder | None
    _watch: ProgressCallback
    _tell: Callable[[str], None]
    _steps: int

    def __post_init__(self, plan: Plan, first_step: int) -> None:
        self._devices = frozenset(self._devices)
        self._shown = first_step
        # When the step before ended; None before the first step that this process has seen.
        self._ended_s: float | None = None
        # Pairs of a step and the plan from that step on, in increasing order of steps.
        self._timeline = [(first_step, plan)]
        # The layers that change devices before the first step of a plan, by this step.
        self._moves: dict[int, tuple[LayerTransfer, ...]] = {}
        self.decision_events: list[Event] = []
        self.absences = Absences(lambda row: None if self._attempt is None else self._attempt.add_absence(row))
        self.losses: dict[int, float] = {}
        self.norms: dict[int, GradientNorms] = {}
        self._arrivals = LateArrivals()
        self._thinking = None
        if self._adaptation is not None:
            self._thinking = Thinking(self._adaptation, partial(PolicyCall, self._adaptation.propose))

    def finish_step(self, step: int, parts: Sequence[dict[str, Any]], away: list[str]) -> NewPlan | None:
        """Return the new plan that the policy decides after a step; None if the plan stays.

        Args:
            step: The step that all ranks have finished.
            parts: The messages that the ranks have published for the step; see `executor.core.messages.pack`.
            away: The devices that have no process.
        """
        rows = self._collect(parts)
        # Updates belong to earlier steps if they arrive late.
        events = [event for event in rows if not (is_exchange(event) or event.kind is EventKind.UPDATE)]
        if losses := [part["loss"] for part in parts if part["loss"] is not None]:
            self.losses[step] = sum(losses)
        local = [LocalNorms(**part["norms"]) for part in parts if part["norms"] is not None]
        if (norms := GradientNorms.of_devices(local)) is not None:
            self.norms[step] = norms
        self._keep(step)
        self.absences.see(events, away)
        if step < self._shown:
            return None
        self._shown = step + 1
        decision = self._decide(step, events, [*filter(is_exchange, rows)], away)
        self._show(step, events, decision, away)
        return None if decision is None else self.plan_at(decision.first_step)

    def _keep(self, step: int) -> None:
        """Write what is known of a step where it outlives this process."""
        if self._attempt is None:
            return
        if self._rows is not None:
            self._rows.flush()
        if step in self.losses:
            self._attempt.add_loss(step, self.losses[step])
        if step in self.norms:
            self._attempt.add_norms(self.norms[step])

    def _decide(self, step: int, events: list[Event], exchanges: list[Event], away: list[str]) -> Decision | None:
        """Return the decision of the policy; None if the plan stays."""
        if self._adaptation is None or self._thinking is None:
            return None
        norms = self.norms.get(step)
        decision = self._thinking.finish_step(step, [*events, *exchanges], tuple(away), time.monotonic(), norms)
        if decision is None:
            return None
        made_s = max(event.end_s for event in events)
        self._keep_decision(decision, made_s)
        self._check(decision)
        self._add(decision, made_s)
        return decision

    def _add(self, decision: Decision, made_s: float) -> None:
        assert self._adaptation is not None
        self._note(decision, made_s)
        self._timeline.append((decision.first_step, decision.plan))
        if self._adaptation.is_start(decision):
            self._moves[decision.first_step] = decision.migration.moves

    def _show(self, step: int, events: list[Event], decision: Decision | None, away: list[str]) -> None:
        began_s = min((event.start_s for event in events), default=0.0) if self._ended_s is None else self._ended_s
        end_s = max((event.end_s for event in events), default=began_s)
        change = decision.change if decision is not None else ""
        took_s, samples = end_s - began_s, self.plan_at(step).plan.global_batch
        loss = self.losses.get(step)
        self._watch(Progress(step, self._steps, end_s, took_s, samples, loss, change, tuple(away)))
        self._ended_s = end_s

    def lose_devices(
        self, resumed: int, gone: list[str], away: list[str], parts: Sequence[dict[str, Any]], now_s: float
    ) -> list[NewPlan]:
        """Call the policy after a loss; return the known plans of step ``resumed`` and of the steps after it.

        Args:
            resumed: The first step to be repeated.
            gone: The devices that are lost; empty if only connections are lost. The policy is shown those that plans
                still name: it may have answered the loss of others with a plan that no session has begun with yet.
            away: All devices that have no process.
            parts: The rows of unfinished steps, as in `finish_step`.
            now_s: When the loss was found, in run seconds.
        """
        # Devices revert the updates of lost steps.
        events = self._collect(
            parts, lambda event: event.kind is not EventKind.COMPUTE or event.action != UPDATE_ACTION
        )
        self._record_waiting()
        self.losses = {step: loss for step, loss in self.losses.items() if step < resumed}
        self.norms = {step: norms for step, norms in self.norms.items() if step < resumed}
        self.absences.begin(gone, now_s)
        decision = None
        known = [self.plan_at(step).plan for step in range(resumed, self._shown + DECISION_LAG_STEPS)]
        missed = tuple(device for device in gone if any(device in plan.devices for plan in known))
        if self._thinking is not None and gone:
            self._thinking.settle()
        if self._adaptation is not None and missed:
            decision = self._adaptation.lose_devices(self._shown, events, missed, tuple(away))
            if decision is not None:
                self._note(decision, now_s)
                self._keep_decision(decision, now_s)
                self._check(decision)
                earlier = [each for each in self._timeline if each[0] < resumed]
                self._timeline = [*earlier, (resumed, decision.plan)]
                self._moves = {step: moves for step, moves in self._moves.items() if step < resumed} | {resumed: ()}
        if gone:
            waits = "when their processes are back" if missed else "by the others"
            how = waits if decision is None else "by the others, with another plan"
            self._tell(f"lost: {', '.join(gone)}; steps from {resumed + 1} on are done again, {how}")
        return [self.plan_at(step) for step in range(resumed, self._shown + DECISION_LAG_STEPS)]

    def end(self) -> None:
        """Record what is left, and wait for the policy after the last step; raise what it raises."""
        self._record_waiting()
        if self._thinking is not None:
            self._thinking.end()

    def restore(self, decisions: Iterable[tuple[Decision, float]]) -> None:
        """Go on after the decisions of an earlier launcher of this run, with the second at which each was made."""
        assert self._adaptation is not None
        for decision, made_s in decisions:
            self._adaptation.restore(decision)
            self._add(decision, made_s)

    def plan_at(self, step: int) -> NewPlan:
        """Return the plan of a step, which is at most the last finished step plus `DECISION_LAG_STEPS`."""
        plan = self.present_plans()(step)
        before = self._first_sample + samples_before(step, self._timeline)
        return NewPlan(plan, before, self._moves.get(step))

    def present_plans(self) -> Callable[[int], Plan]:
        """Return a function that returns the plan of a step as far as it is known now."""
        timeline = tuple(self._timeline)
        return lambda step: next(plan for first, plan in reversed(timeline) if first <= step)

    def collect(self, parts: Iterable[dict[str, Any]]) -> list[Event]:
        """Record the rows in parts, without the arrivals that other parts may tell; return them."""
        return self._record([event for part in parts for event in unpack(part["rows"], self._devices)])

    def show(self, progress: Progress) -> None:
        """Show the progress of a run whose pipelines finish no step together."""
        self._watch(progress)

    def lose_worker(self, gone: Sequence[str], now_s: float) -> None:
        """Note that a pipeline has lost devices at run second ``now_s``, and that the others go on."""
        self.absences.begin(gone, now_s)
        self._tell(f"lost: {', '.join(gone)}; the other pipelines go on, and this one follows when it is back")

    def _collect(
        self, parts: Sequence[dict[str, Any]], is_kept: Callable[[Event], bool] = lambda _: True
    ) -> list[Event]:
        rows = [event for part in parts for event in unpack(part["rows"], self._devices) if is_kept(event)]
        complete = self._arrivals.add(rows)
        # What outlives this process is written at once, without the arrivals that later parts tell.
        self._record(complete if self._attempt is None else with_arrivals(rows))
        return complete

    def _record_waiting(self) -> None:
        waiting = self._arrivals.drop()
        if self._attempt is None:
            self._record(waiting)

    def _record(self, events: list[Event]) -> list[Event]:
        if self._rows is not None:
            for event in events:
                self._rows.log(event)
            self._rows.end_step()
        return events

    def _note(self, decision: Decision, now_s: float) -> None:
        place = ("", "", -1, -1, -1, decision.observed_step, "")
        self.decision_events.append(Event(EventKind.DECISION, *place, now_s, now_s, 0))

    def _keep_decision(self, decision: Decision, now_s: float) -> None:
        if self._attempt is not None:
            self._attempt.add_decision(decision, now_s)
