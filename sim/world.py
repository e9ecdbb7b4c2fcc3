"""A simulated run: steps under way, the network between the devices, the plan of each step, and the clock."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import simpy

from planner.adaptation import Adaptation
from planner.compiled_step import compile_step
from planner.events import Event, EventKind
from planner.plan import Plan
from planner.policy import DECISION_LAG_STEPS
from planner.scenario import Scenario
from sim.advance import SHARED, advance
from sim.connection import Parcel
from sim.devices import make_devices
from sim.network import Network
from sim.recorder import Recorder
from sim.steps import StepUnderWay, begin_step


class World:
    """One run of ``steps`` steps.

    Devices run ahead of the clock as far as their times follow from what is known; the clock moves only where a
    message passes over links that others use too.
    """

    def __init__(self, scenario: Scenario, plan: Plan, adaptation: Adaptation | None, steps: int) -> None:
        self.environment = simpy.Environment()
        self._scenario = scenario
        self._plan = plan
        self._adaptation = adaptation
        self._steps = steps
        self._ready_notice = scenario.effects.network.ready_notice
        compiled = compile_step(plan, scenario)
        self.actors = compiled.actors
        groups = {replica.device: replica.devices for p in plan.pipelines for s in p.stages for replica in s.replicas}
        self._devices = make_devices([groups[actor] for actor in self.actors], scenario)
        self.network = Network(
            self.environment, scenario, _pairs(plan, scenario, adaptation), plan.connections, self._deliver, self._work
        )
        self.recorder = Recorder(plan.devices, {leader: group[1:] for leader, group in groups.items() if group[1:]})
        self._under_way: dict[int, StepUnderWay] = {}
        self._known_steps = DECISION_LAG_STEPS if adaptation is not None else steps
        self._undecided: dict[int, list[int]] = {}
        self._ready: deque[tuple[int, list[int]]] = deque()
        self._working = False
        self.unfinished_actors = len(self.actors)

    def run(self) -> None:
        """Run until nothing moves any more."""
        self._enter(0, range(len(self.actors)))
        self._work()
        self.environment.run()

    @property
    def now_s(self) -> float:
        """How far the run has come."""
        return max(float(self.environment.now), float(self._devices.clock_s.max()))

    @property
    def waiting(self) -> list[str]:
        """Devices that have not finished the last step."""
        rest = {actor for under_way in self._under_way.values() for actor in _unfinished(under_way)}
        rest |= {actor for actors in self._undecided.values() for actor in actors}
        return [self.actors[actor] for actor in sorted(rest)] if self.unfinished_actors else []

    def _enter(self, step: int, actors: Sequence[int]) -> None:
        """Let actors begin a step, or wait until its plan is known."""
        if step == self._steps:
            self.unfinished_actors -= len(actors)
        elif step >= self._known_steps:
            self._undecided.setdefault(step, []).extend(actors)
        else:
            under_way = self._step(step)
            under_way.begun_s[actors] = self._devices.clock_s[actors]
            self._ready.append((step, list(actors)))
            for actor in actors if under_way.unposted else ():
                self._post(under_way, actor)

    def _step(self, step: int) -> StepUnderWay:
        if step not in self._under_way:
            plan = self._plan if self._adaptation is None else self._adaptation.plan_for(step)
            self._under_way[step] = begin_step(step, plan, self._scenario, self.network)
        return self._under_way[step]

    def _work(self) -> None:
        """Let everybody who is ready go on, step by step, until all of them wait."""
        if self._working:
            return
        self._working = True
        while self._ready:
            step, actors = self._ready.popleft()
            while self._ready and self._ready[0][0] == step:
                actors += self._ready.popleft()[1]
            under_way = self._under_way[step]
            shared, finished = advance(
                under_way.compiled.graph,
                under_way.times,
                self.network.lines,
                self._devices,
                under_way.state,
                np.array(actors, np.int64),
            )
            for message in shared.tolist():
                self._send(step, under_way, message)
            if len(finished):
                self._enter(step + 1, finished.tolist())
                under_way.unfinished -= len(finished)
                self._finish(step, under_way)
        self._working = False

    def _send(self, step: int, under_way: StepUnderWay, message: int) -> None:
        graph = under_way.compiled.graph
        line = int(under_way.times.line[graph.channel[message]])
        if self.network.lines.mode[line] != SHARED:
            # A line of its own that never carries it: its receiver waits for ever, and the run ends with that.
            return
        under_way.unfinished += 1
        size_bytes = int(under_way.compiled.messages.size_bytes[message])
        parcel = Parcel(step, message, size_bytes, float(under_way.state.handed_s[message]))
        if self._ready_notice:
            receiver = int(graph.receiver[message])
            if np.isnan(under_way.begun_s[receiver]):
                under_way.unposted.setdefault(receiver, []).append((line, parcel))
                return
            parcel.posted_s = float(under_way.begun_s[receiver])
        self.network.send(line, parcel)

    def _post(self, under_way: StepUnderWay, actor: int) -> None:
        """Let those parcels go that waited for an actor to begin the step."""
        for line, parcel in under_way.unposted.pop(actor, ()):
            parcel.posted_s = float(under_way.begun_s[actor])
            self.network.send(line, parcel)

    def _deliver(self, parcel: Parcel, departed_s: float, arrived_s: float) -> None:
        under_way = self._under_way[parcel.step]
        state = under_way.state
        state.departed_s[parcel.message] = departed_s
        state.arrival_s[parcel.message] = arrived_s
        actor = int(state.waiting[parcel.message])
        if actor >= 0:
            state.waiting[parcel.message] = -1
            self._ready.append((parcel.step, [actor]))
        under_way.unfinished -= 1
        self._finish(parcel.step, under_way)

    def _finish(self, step: int, under_way: StepUnderWay) -> None:
        """When a step is over, write it down and let the policy see it."""
        if under_way.unfinished:
            return
        del self._under_way[step]
        events = self.recorder.finish(step, under_way.compiled, under_way.state)
        if self._adaptation is None:
            return
        over_s = float(np.nanmax(np.concatenate((under_way.state.end_s, under_way.state.departed_s))))
        decision = self._adaptation.finish_step(step, events)
        if decision is not None:
            self.recorder.add(Event(EventKind.DECISION, "", "", -1, -1, -1, step, "", over_s, over_s, 0))
        self._known_steps = step + DECISION_LAG_STEPS + 1
        waiting = self._undecided.pop(step + DECISION_LAG_STEPS, [])
        self._devices.clock_s[waiting] = np.maximum(self._devices.clock_s[waiting], over_s)
        if waiting:
            self._enter(step + DECISION_LAG_STEPS, waiting)


def _unfinished(under_way: StepUnderWay) -> list[int]:
    graph = under_way.compiled.graph
    begun = ~np.isnan(under_way.begun_s)
    return np.flatnonzero(begun & (under_way.state.position < graph.first_action[1:])).tolist()


def _pairs(plan: Plan, scenario: Scenario, adaptation: Adaptation | None) -> list[tuple[str, str]]:
    """Ordered pairs of devices that may talk; a policy may change which replicas of neighbouring stages do."""
    compiled = compile_step(plan, scenario)
    graph, actors = compiled.graph, compiled.actors
    talking = zip(graph.channel_sender.tolist(), graph.channel_receiver.tolist(), strict=True)
    pairs = dict.fromkeys((actors[sender], actors[receiver]) for sender, receiver in talking)
    if adaptation is not None:
        for pipeline in plan.pipelines:
            for left, right in zip(pipeline.stages, pipeline.stages[1:], strict=False):
                for one in left.replicas:
                    for other in right.replicas:
                        pairs |= {(one.device, other.device): None, (other.device, one.device): None}
    return [pair for pair in pairs if pair[0] != pair[1]]
