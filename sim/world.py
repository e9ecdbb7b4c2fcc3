"""What the simulated devices share: the clock, the network, what has arrived, and the plan of each step."""

from collections import defaultdict
from collections.abc import Hashable

import simpy

from planner.adaptation import Adaptation
from planner.events import Event, EventKind
from planner.plan import Plan
from planner.policy import DECISION_LAG_STEPS
from planner.program import DeviceProgram, compile_plan
from planner.scenario import Scenario
from sim.channel import Channel
from sim.network import Network


class World:
    """One simulated run."""

    def __init__(self, scenario: Scenario, plan: Plan, adaptation: Adaptation | None) -> None:
        self.environment = simpy.Environment()
        self.events: list[Event] = []
        self.element_bytes = scenario.training.element_bytes
        self._scenario = scenario
        self._plan = plan
        self._adaptation = adaptation
        self._network = Network(self.environment)
        self._channels: dict[tuple[str, str], Channel] = {}
        self._arrivals: dict[Hashable, simpy.Event] = {}
        self._unfinished: defaultdict[int, int] = defaultdict(lambda: len(plan.devices))
        self._events_of_step: defaultdict[int, list[Event]] = defaultdict(list)
        self._known: dict[int, simpy.Event] = {}

    def program(self, step: int, device: str) -> DeviceProgram:
        """Return what a device does in a step."""
        plan = self._plan if self._adaptation is None else self._adaptation.plan_for(step)
        return compile_plan(plan, self._scenario)[device]

    def channel(self, source: str, target: str) -> Channel:
        """Return the connection from one device to another."""
        key = (source, target)
        if key not in self._channels:
            path = self._scenario.cluster.path(source, target)
            self._channels[key] = Channel(self.environment, self._network, path)
        return self._channels[key]

    def arrival(self, key: Hashable) -> simpy.Event:
        """Return the event of a message's arrival; sender and receiver name it by the same key."""
        if key not in self._arrivals:
            self._arrivals[key] = self.environment.event()
        return self._arrivals[key]

    def forget(self, key: Hashable) -> None:
        """Drop a message that has been taken."""
        del self._arrivals[key]

    def log(self, event: Event) -> None:
        """Write an event down."""
        self.events.append(event)
        if self._adaptation is not None:
            self._events_of_step[event.step].append(event)

    def plan_known(self, step: int) -> simpy.Event:
        """Return the event of the step's plan being decided."""
        if step not in self._known:
            known = self._known[step] = self.environment.event()
            if self._adaptation is None or step < DECISION_LAG_STEPS:
                known.succeed()
        return self._known[step]

    def expect_send(self, step: int) -> None:
        """Count one more thing that must finish before the step is over."""
        self._unfinished[step] += 1

    def finish(self, step: int) -> None:
        """Count one thing less; after the last one the policy sees the step."""
        self._unfinished[step] -= 1
        if self._unfinished[step] or self._adaptation is None:
            return
        decision = self._adaptation.finish_step(step, self._events_of_step.pop(step))
        if decision is not None:
            now_s = self.environment.now
            self.events.append(Event(EventKind.DECISION, "", "", -1, -1, -1, step, "", now_s, now_s, 0))
        self.plan_known(step + DECISION_LAG_STEPS).succeed()
