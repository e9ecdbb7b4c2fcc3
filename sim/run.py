"""The course of a run: worlds one after the other, with migrations between them, and departures that are answered."""

from itertools import groupby

from planner.adapt.adaptation import Adaptation
from planner.adapt.policy import Decision
from planner.events.event import fault_events
from planner.events.log import EventLog
from planner.plan.plan import Plan
from planner.scenario.faults import DETECTION_S, known_away, noticed_absences
from planner.scenario.scenario import Scenario
from sim.epoch import Epoch, EpochRun
from sim.network.network import Network
from sim.recorder import Recorder
from sim.step_gate import StopCondition
from traces.common.errors import RunError


class Run:
    """One run.

    Where a decision moves layers, they travel when who has them is done with the step before, and who needs them
    begins when they are there: nobody waits for anything else. Where devices have left and the policy goes on without
    them, the step under way is lost at the moment when that is known: what everybody has finished before is kept.

    Args:
        scenario: What is trained, where.
        plan: Of the first step.
        adaptation: Gives those of the others; None for all the same.
        horizon: How far it goes.
    """

    def __init__(self, scenario: Scenario, plan: Plan, adaptation: Adaptation | None, horizon: StopCondition) -> None:
        self._scenario = scenario
        self._plan = plan
        self._adaptation = adaptation
        self._horizon = horizon
        self._recorder = Recorder([device.name for device in scenario.cluster.devices])

    def run(self) -> EventLog:
        """Return all that happens.

        Raises:
            RunError: The run stalls, outlasts a trace that ends, or a decision cannot be carried out.
        """
        set_up = Epoch(self._plan)
        while True:
            world = EpochRun(self._scenario, set_up, self._adaptation, self._horizon, self._recorder)
            upcoming = self._answered_departure(world, set_up) or self._finished(world, set_up)
            if upcoming is None:
                break
            set_up = upcoming
        for event in (*world.updates.events(), *fault_events(self._scenario.faults, world.now_s)):
            self._recorder.add(event)
        return self._recorder.log()

    def _answered_departure(self, world: EpochRun, set_up: Epoch) -> Epoch | None:
        """Run a world until a device of the plan is known to have left and the policy goes on without it.

        Returns:
            With what that begins; None if it never did, and the world has run until nothing moved any more.
        """
        plan = set_up.plan
        absences = noticed_absences(self._scenario.faults)
        if self._adaptation is not None and plan.synchronisation.method == "allreduce" and absences:
            start_s = world.move()
            own = [each for each in absences if each.device in plan.devices and each.end_s > start_s]
            for noticed_s, _ in groupby(own, key=lambda absence: max(absence.start_s + DETECTION_S, start_s)):
                world.run(noticed_s)
                if world.is_over:
                    break
                away = known_away(absences, noticed_s)
                gone = tuple(device for device in away if device in plan.devices)
                decision = self._ask(self._adaptation, world, noticed_s, gone, away)
                if decision is not None:
                    moves = decision.migration.moves
                    return Epoch(decision.plan, decision.first_step, moves, earliest_s=noticed_s)
        world.run()
        return None

    def _ask(
        self, adaptation: Adaptation, world: EpochRun, now_s: float, gone: tuple[str, ...], away: tuple[str, ...]
    ) -> Decision | None:
        """Show the policy the step under way; if it goes on without those who are gone, that step is lost."""
        lost = [
            self._recorder.until(now_s, step, each.compiled, each.state, world.partners)
            for step, each in sorted(world.under_way.items())
        ]
        happened = [event for part in lost for event in part]
        decision = adaptation.lose_devices(world.next_step, happened, gone, away)
        if decision is not None:
            for part in lost:
                self._recorder.keep(part)
            self._recorder.decide(decision, now_s)
        return decision

    def _finished(self, world: EpochRun, set_up: Epoch) -> Epoch | None:
        """Return with what the world begins for which this one ended; None if the run is over."""
        if not world.is_over:
            raise RunError(
                f"the run stalls at {world.now_s:.3f} s: {', '.join(world.waiting)} wait for bytes that "
                "never arrive; does a link stay at rate zero, or a device never return?"
            )
        _refuse_ended_traces(world.network, world.now_s, self._scenario)
        if self._adaptation is None:
            return None
        start = self._adaptation.next_start(set_up.first_step)
        if start is None or start.first_step != world.next_step:
            return None
        ended_s = world.ended_s
        if not self._horizon.allows(world.next_step, max(ended_s.values())):
            return None
        return Epoch(start.plan, start.first_step, start.migration.moves, ended_s, min(ended_s.values()))


def _refuse_ended_traces(network: Network, end_s: float, scenario: Scenario) -> None:
    """What happened after a trace ended is made up: such a run is none."""
    used = {link.name for route in network.routes for link in route.path}
    for link in scenario.cluster.links:
        trace = link.trace
        if link.name in used and trace is not None and trace.ends and trace.duration_s < end_s:
            raise RunError(
                f"the run lasts {end_s:.3f} s, but the trace of link {link.name} ends at {trace.duration_s:g} s: "
                "let it loop, give a longer one, or run fewer steps"
            )
