"""The simulator as a backend: runs a plan, with or without a policy, in a model of the cluster."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path

from planner.adapt.adaptation import Adaptation
from planner.adapt.policy import Policy
from planner.check import check_plan
from planner.check.paths import check_traces_last
from planner.events.event import fault_events
from planner.events.file import EventFile, EventSpool
from planner.events.log import EventLog
from planner.plan.plan import Plan
from planner.runs.record import RunRecord
from planner.scenario.faults import Absence, known_away, noticed_absences, return_of, with_ended_hangs
from planner.scenario.scenario import Scenario
from sim.epoch import Epoch, EpochRun
from sim.network.link_probes import LinkProbes
from sim.recorder import Recorder
from sim.step_gate import PolicyClock, StopCondition
from sim.updates.async_updates import AsyncUpdates
from traces.common.errors import RunError


class Simulator:
    """Runs plans in simulated time. The same inputs give the same events.

    Args:
        duration_s: Time from which no step starts, seconds from the start of the run; steps that have started are
            finished.
        backup_every: Number of steps between copies of the state that devices send to others, as in a real run with
            ``--backup-every``; 0 for no copies.
        file: File to write the events to while the run goes on; the record then reads them from there. None to keep
            them in memory.
    """

    def __init__(self, duration_s: float = math.inf, backup_every: int = 0, file: Path | None = None) -> None:
        self._duration_s = duration_s
        self._backup_every = backup_every
        self._file = file

    def run(self, scenario: Scenario, plan: Plan, policy: Policy | None, steps: int) -> RunRecord:
        """Simulate ``steps`` training steps, or only those that start before ``duration_s``.

        Raises:
            InputError: The scenario cannot carry out the plan.
            RunError: Devices wait for a link that stays at rate zero, or for a device that never returns; or a decision
                cannot be carried out.
        """
        check_plan(plan, scenario)
        if self._duration_s == math.inf:
            check_traces_last(scenario, plan, steps)
        adaptation = None
        if policy is not None:
            adaptation = Adaptation(policy, plan, scenario, steps=steps, duration_s=self._duration_s)
        stop = StopCondition(steps, self._duration_s)
        spool = EventSpool(self._file) if self._file is not None else None
        events = Run(scenario, plan, adaptation, stop, self._backup_every, spool).run()
        decisions = tuple(adaptation.decisions) if adaptation is not None else ()
        return RunRecord("simulated", scenario, plan, events, decisions)


class Run:
    """One run: epochs one after the other, with migrations between them.

    There is no barrier at a migration: layers are sent as soon as their source has finished the previous step, and a
    device starts the next step when it has received all its layers. If devices leave and the policy continues without
    them, unfinished steps are lost when the absence is detected. Finished steps are kept or, if the run makes copies of
    the state, repeated from the newest complete copies on; then also if all wait until the devices return.

    Args:
        adaptation: Decides the plans of later steps; None if all steps have the same plan.
        backup_every: Number of steps between copies of the state; 0 for no copies.
        spool: Takes the events; None to keep them in memory.
    """

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        adaptation: Adaptation | None,
        stop: StopCondition,
        backup_every: int,
        spool: EventSpool | None,
    ) -> None:
        self._faults = scenario.faults
        replaces = backup_every or plan.synchronisation.is_decoupled
        self._scenario = replace(scenario, faults=with_ended_hangs(self._faults)) if replaces else scenario
        self._plan = plan
        self._adaptation = adaptation
        self._stop = stop
        self._backup_every = backup_every
        devices = [device.name for device in scenario.cluster.devices]
        measures = adaptation is not None and adaptation.measures_unused_links
        links = LinkProbes(self._scenario) if measures else None
        self._recorder = Recorder(devices, probes=adaptation is not None, link_probes=links, spool=spool)
        self._policy = PolicyClock(adaptation) if adaptation is not None else None
        self._updates = AsyncUpdates(plan.synchronisation, stop.steps)

    def run(self) -> EventLog | EventFile:
        """Return all events of the run.

        Raises:
            RunError: The run stalls, lasts longer than a trace that ends, or a decision cannot be carried out.
        """
        epoch: Epoch | None = Epoch(self._plan)
        while epoch is not None:
            epoch_run = EpochRun(
                self._scenario, epoch, self._policy, self._stop, self._recorder, self._updates, self._backup_every
            )
            epoch = self._run_to_departure(epoch_run, epoch.plan) or self._next_epoch(epoch_run)
        epoch_run.close()
        for event in chain(self._updates.events(), fault_events(self._faults, epoch_run.now_s)):
            self._recorder.add(event)
        return self._recorder.log()

    def _run_to_departure(self, epoch_run: EpochRun, plan: Plan) -> Epoch | None:
        """Run an epoch, and return the next epoch if a device leaves and steps are lost.

        That is so if the policy continues without the device, or if the run makes copies of the state, from which the
        process that replaces the device begins. Otherwise the epoch runs until no event is left, and None is returned.
        """
        absences, how = noticed_absences(self._scenario.faults), plan.synchronisation
        can_go_on = self._policy is not None and (how.method == "allreduce" or how.has_common_outer_step)
        if absences and (can_go_on or self._restores(plan)):
            start_s = epoch_run.receive_layers()
            own = [each for each in absences if each.device in plan.devices and each.end_s > start_s]
            for noticed_s, _ in groupby(own, key=lambda absence: max(absence.noticed_s, start_s)):
                epoch_run.run(noticed_s)
                if epoch_run.is_over:
                    break
                if (epoch := self._after_loss(epoch_run, plan, absences, noticed_s)) is not None:
                    return epoch
        epoch_run.run()
        return None

    def _restores(self, plan: Plan) -> bool:
        """Return whether devices that return get the state of their layers from copies, and steps are repeated."""
        return self._backup_every > 0 and plan.synchronisation.method == "allreduce"

    def _after_loss(self, epoch_run: EpochRun, plan: Plan, absences: Sequence[Absence], now_s: float) -> Epoch | None:
        """Let the policy observe unfinished steps; return the epoch after them if they are lost."""
        away = known_away(absences, now_s)
        gone = tuple(device for device in away if device in plan.devices)
        resumed, step = epoch_run.resumable_step(away), epoch_run.gate.next_unobserved
        parts = [self._recorder.until(now_s, step) for _, step in sorted(epoch_run.steps.items())]
        decision = None
        if self._policy is not None:
            events = [event for part in parts for event in part]
            decision = self._policy.lose_devices(step, events, gone, away, resumed, now_s)
        back_s, returning = return_of([each for each in absences if each.device in plan.devices], now_s)
        if decision is None and (back_s == math.inf or not self._restores(plan)):
            return None
        for part in parts:
            self._recorder.keep(part)
        if decision is not None:
            assert self._policy is not None
            self._recorder.decide(decision, now_s)
            return Epoch(
                decision.plan,
                resumed,
                decision.migration.moves,
                earliest_s=self._policy.known_s,
                observed_steps=decision.observed_step,
            )
        resumed = epoch_run.resumable_step(returning)
        if self._policy is not None:
            plan, back_s = self._policy.adaptation.plan_for(resumed), max(back_s, self._policy.known_s)
        transfers = epoch_run.restoring_transfers(resumed)
        return Epoch(plan, resumed, transfers, earliest_s=back_s, observed_steps=step)

    def _next_epoch(self, epoch_run: EpochRun) -> Epoch | None:
        """Return the epoch that follows one that has run to its end; None if the run is over.

        Raises:
            RunError: The epoch stalls, or lasts longer than a trace that ends.
        """
        if not epoch_run.is_over:
            raise RunError(
                f"the run stalls at {epoch_run.now_s:.3f} s: {', '.join(epoch_run.waiting)} wait for bytes that "
                "never arrive; does a link stay at rate zero, or a device never return?"
            )
        self._check_traces(epoch_run)
        gate = epoch_run.gate
        start = self._adaptation.next_start(gate.first_step) if self._adaptation is not None else None
        if start is None or start.first_step != gate.next_step:
            return None
        ended_s = epoch_run.ended_s
        if not self._stop.allows(gate.next_step, max(ended_s.values())):
            return None
        return Epoch(start.plan, start.first_step, start.migration.moves, ended_s, min(ended_s.values()))

    def _check_traces(self, epoch_run: EpochRun) -> None:
        """Refuse a run that lasts longer than a trace with ``ends``, after which the link's rate is unknown."""
        used = {link.name for route in epoch_run.network.routes for link in route.path}
        for link in self._scenario.cluster.links:
            trace = link.trace
            if link.name in used and trace is not None and trace.ends and trace.duration_s < epoch_run.now_s:
                raise RunError(
                    f"the run lasts {epoch_run.now_s:.3f} s, but the trace of link {link.name} ends at "
                    f"{trace.duration_s:g} s: let it loop, give a longer one, or run fewer steps"
                )
