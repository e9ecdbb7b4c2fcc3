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
from planner.update_exchange import update_edges
from sim.advance import SHARED, advance, hand_over
from sim.connection import Parcel
from sim.devices import make_devices
from sim.dynamic import DynamicStep
from sim.network import Network
from sim.recorder import Recorder
from sim.steps import StepUnderWay, begin_step
from sim.updates import Updates


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
        self._dynamic: dict[int, DynamicStep] = {}
        self._known_steps = DECISION_LAG_STEPS if adaptation is not None else steps
        self._undecided: dict[int, list[int]] = {}
        edges = update_edges(plan, scenario)
        self._updates = Updates(edges, plan.synchronisation, self.actors)
        self._update_line = [self.network.number[edge.sender, edge.receiver] for edge in edges]
        self._bounded: list[tuple[int, int]] = []
        self._unannounced: list[tuple[int, int]] = []
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
        rest |= {actor for _, actor in self._bounded}
        return [self.actors[actor] for actor in sorted(rest)] if self.unfinished_actors else []

    def _enter(self, step: int, actors: Sequence[int]) -> None:
        """Let actors begin a step, or wait until its plan is known."""
        if step == self._steps:
            self.unfinished_actors -= len(actors)
        elif step >= self._known_steps:
            self._undecided.setdefault(step, []).extend(actors)
        else:
            if self._update_line:
                actors = [actor for actor in actors if self._may_begin(step, actor)]
            under_way = self._step(step)
            under_way.begun_s[actors] = self._devices.clock_s[actors]
            if self._ready_notice:
                self._announce(step, actors)
            dynamic = self._dynamic.get(step)
            if dynamic is None:
                self._ready.append((step, list(actors)))
            else:
                for actor in actors:
                    dynamic.begin(actor)

    def _announce(self, step: int, actors: Sequence[int]) -> None:
        """Let actors that begin a step post the receives of the next one, or as soon as its plan is known."""
        for actor in actors:
            now_s = float(self._devices.clock_s[actor])
            if step == 0:
                self._post(0, actor, now_s)
            if step + 1 < self._known_steps:
                self._post(step + 1, actor, now_s)
            elif step + 1 < self._steps:
                self._unannounced.append((step + 1, actor))

    def _post(self, step: int, actor: int, now_s: float) -> None:
        """Take note that an actor posts its receives of a step, and let those parcels go that waited for it."""
        if step < self._steps:
            under_way = self._step(step)
            under_way.posted_s[actor] = now_s
            for line, parcel in under_way.unposted.pop(actor, ()):
                parcel.posted_s = now_s
                self.network.send(line, parcel)

    def _may_begin(self, step: int, actor: int) -> bool:
        """Whether what an actor has received lets it begin a step; its clock moves to when it did."""
        may_begin_s = self._updates.may_begin_s(actor, step)
        if may_begin_s is None:
            self._bounded.append((step, actor))
            return False
        self._devices.clock_s[actor] = max(self._devices.clock_s[actor], may_begin_s)
        self._updates.begin(actor, float(self._devices.clock_s[actor]))
        return True

    def _step(self, step: int) -> StepUnderWay:
        if step not in self._under_way:
            plan = self._plan if self._adaptation is None else self._adaptation.plan_for(step)
            under_way = self._under_way[step] = begin_step(step, plan, self._scenario, self.network)
            if plan.order == "dynamic":
                self._dynamic[step] = self._choosing(step, plan, under_way)
        return self._under_way[step]

    def _choosing(self, step: int, plan: Plan, under_way: StepUnderWay) -> DynamicStep:
        """The devices of a step in which they choose for themselves."""

        def send(message: int, now_s: float) -> None:
            graph, times, state = under_way.compiled.graph, under_way.times, under_way.state
            if hand_over(graph, times, self.network.lines, state, message, now_s):
                dynamic.arrive(message)
            else:
                self._send(step, under_way, message)

        def finish(actor: int) -> None:
            self._ready.append((step, [actor]))
            self._work()

        dynamic = DynamicStep(self.environment, plan, self._scenario, under_way, self._devices, send, finish)
        return dynamic

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
            shared_count, finished_count = advance(
                under_way.compiled.graph,
                under_way.times,
                self.network.lines,
                self._devices,
                under_way.state,
                np.array(actors, np.int64),
            )
            for message in under_way.state.shared[:shared_count].tolist() if shared_count else ():
                self._send(step, under_way, message)
            if not finished_count:
                continue
            finished = under_way.state.finished[:finished_count].tolist()
            for actor in finished if self._update_line else ():
                for edge, parcel in self._updates.finish(actor, float(self._devices.clock_s[actor])):
                    self.network.send(self._update_line[edge], parcel)
            self._enter(step + 1, finished)
            under_way.unfinished -= finished_count
            self._finish(step, under_way)
        self._working = False

    @property
    def updates(self) -> list[Event]:
        """Updates that pipelines applied, with their staleness."""
        return self._updates.events()

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
            if np.isnan(under_way.posted_s[receiver]):
                under_way.unposted.setdefault(receiver, []).append((line, parcel))
                return
            parcel.posted_s = float(under_way.posted_s[receiver])
        self.network.send(line, parcel)

    def _deliver(self, parcel: Parcel, departed_s: float, arrived_s: float) -> None:
        if parcel.message < 0:
            self._apply(parcel, departed_s, arrived_s)
            return
        under_way = self._under_way[parcel.step]
        state = under_way.state
        state.departed_s[parcel.message] = departed_s
        state.arrival_s[parcel.message] = arrived_s
        actor = int(state.waiting[parcel.message])
        if parcel.step in self._dynamic and actor < 0:
            self._dynamic[parcel.step].arrive(parcel.message)
        elif actor >= 0:
            state.waiting[parcel.message] = -1
            self._ready.append((parcel.step, [actor]))
        if under_way.times.blocking[parcel.message] and parcel.step not in self._dynamic:
            self._release(parcel.step, under_way, parcel.message, departed_s)
        under_way.unfinished -= 1
        self._finish(parcel.step, under_way)

    def _apply(self, parcel: Parcel, departed_s: float, arrived_s: float) -> None:
        """Take an update that another pipeline sent, and let those begin who waited for it."""
        self.recorder.add(self._updates.sent(parcel, departed_s))
        actor = self._updates.arrive(parcel, arrived_s)
        waiting = [step for step, other in self._bounded if other == actor]
        self._bounded = [(step, other) for step, other in self._bounded if other != actor]
        for step in waiting:
            self._enter(step, [actor])

    def _release(self, step: int, under_way: StepUnderWay, message: int, departed_s: float) -> None:
        """Let a sender go on that did nothing but send."""
        actor = int(under_way.compiled.actions.actor[under_way.compiled.messages.sender[message]])
        self._devices.clock_s[actor] = max(self._devices.clock_s[actor], departed_s)
        under_way.state.sending[actor] -= 1
        if not under_way.state.sending[actor]:
            self._ready.append((step, [actor]))

    def _finish(self, step: int, under_way: StepUnderWay) -> None:
        """When a step is over, write it down and let the policy see it."""
        if under_way.unfinished:
            return
        del self._under_way[step]
        self._dynamic.pop(step, None)
        events = self.recorder.finish(step, under_way.compiled, under_way.state)
        if self._adaptation is None:
            return
        over_s = float(np.nanmax(np.concatenate((under_way.state.end_s, under_way.state.departed_s))))
        decision = self._adaptation.finish_step(step, events)
        if decision is not None:
            self.recorder.add(Event(EventKind.DECISION, "", "", -1, -1, -1, step, "", over_s, over_s, 0))
        self._known_steps = step + DECISION_LAG_STEPS + 1
        self._announce_known(over_s)
        waiting = self._undecided.pop(step + DECISION_LAG_STEPS, [])
        self._devices.clock_s[waiting] = np.maximum(self._devices.clock_s[waiting], over_s)
        if waiting:
            self._enter(step + DECISION_LAG_STEPS, waiting)

    def _announce_known(self, now_s: float) -> None:
        """Post the receives of a step whose plan has just become known, of those that have begun the one before."""
        known = [(step, actor) for step, actor in self._unannounced if step < self._known_steps]
        self._unannounced = [(step, actor) for step, actor in self._unannounced if step >= self._known_steps]
        for step, actor in known:
            self._post(step, actor, now_s)


def _unfinished(under_way: StepUnderWay) -> list[int]:
    graph = under_way.compiled.graph
    begun = ~np.isnan(under_way.begun_s)
    working = (under_way.state.position < graph.first_action[1:]) | (under_way.state.sending > 0)
    return np.flatnonzero(begun & working).tolist()


def _pairs(plan: Plan, scenario: Scenario, adaptation: Adaptation | None) -> dict[tuple[str, str], bool]:
    """Ordered pairs of devices that may talk, and whether they send updates, which are outside of every step.

    A policy may change which replicas of neighbouring stages talk.
    """
    compiled = compile_step(plan, scenario)
    graph, actors = compiled.graph, compiled.actors
    talking = zip(graph.channel_sender.tolist(), graph.channel_receiver.tolist(), strict=True)
    pairs = {(actors[sender], actors[receiver]): False for sender, receiver in talking}
    for pipeline in plan.pipelines if adaptation is not None else ():
        for left, right in zip(pipeline.stages, pipeline.stages[1:], strict=False):
            for one in left.replicas:
                for other in right.replicas:
                    if one.device != other.device:
                        pairs |= {(one.device, other.device): False, (other.device, one.device): False}
    pairs |= {(edge.sender, edge.receiver): True for edge in update_edges(plan, scenario)}
    return pairs
