"""Which devices talk with which during a set-up."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import simpy

from planner.adapt.adaptation import Adaptation
from planner.adapt.migration import LayerTransfer
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.cost.synchronisation import update_edges
from planner.plan.plan import Plan
from planner.scenario.faults import known_away, noticed_absences
from planner.scenario.scenario import Scenario
from planner.step.compile import compile_step
from sim.async_updates import Updates
from sim.dynamic import DynamicStep
from sim.kernel.advance import SHARED, advance
from sim.kernel.devices import make_devices
from sim.migration import StateTransfer
from sim.network.connection import Message
from sim.network.network import Network
from sim.receives import PostedReceives
from sim.recorder import Recorder
from sim.step import StepUnderWay, begin_step
from sim.step_gate import StopCondition


@dataclass(frozen=True, slots=True)
class Epoch:
    """The beginning of a world.

    Attributes:
        plan: Of the first step.
        first_step: Its index.
        moves: What travels before it; who needs none of it begins at once.
        ready_s: When each device is done with what was before, seconds from the start of the run.
        earliest_s: When devices of which nothing is known could begin, in the same seconds.
    """

    plan: Plan
    first_step: int = 0
    moves: tuple[LayerTransfer, ...] = ()
    ready_s: Mapping[str, float] = field(default_factory=dict)
    earliest_s: float = 0.0

    def ready_at_s(self, device: str) -> float:
        """Return when a device can begin to send or to compute, seconds from the start of the run."""
        return self.ready_s.get(device, self.earliest_s)


def communicating_pairs(plan: Plan, scenario: Scenario, changes: bool) -> dict[tuple[str, str], bool]:
    """Return ordered pairs of devices that may talk, and whether they send updates, which are outside of every step.

    Args:
        plan: Of the first step.
        scenario: What it is for.
        changes: Whether a policy may change which replicas of neighbouring stages talk.
    """
    compiled = compile_step(plan, scenario)
    graph, actors = compiled.graph, compiled.actors
    talking = zip(graph.channel_sender.tolist(), graph.channel_receiver.tolist(), strict=True)
    pairs = {(actors[sender], actors[receiver]): False for sender, receiver in talking}
    for pipeline in plan.pipelines if changes else ():
        for left, right in zip(pipeline.stages, pipeline.stages[1:], strict=False):
            for one in left.replicas:
                for other in right.replicas:
                    pairs |= {(one.device, other.device): False, (other.device, one.device): False}
    pairs |= {(edge.sender, edge.receiver): True for edge in update_edges(plan, scenario)}
    return pairs


class EpochRun:
    """Steps of one set-up: up to the run's end, or to a decision for which everything is set up anew.

    Devices run ahead of the clock as far as their times follow from what is known; the clock moves only where a
    message passes over links that others use too.

    Args:
        scenario: What is trained, where.
        set_up: The plan of the first step, and how it begins.
        adaptation: Gives the plans of the others; None for all the same.
        horizon: How far the run goes.
        recorder: Where rows go.
    """

    def __init__(
        self,
        scenario: Scenario,
        set_up: Epoch,
        adaptation: Adaptation | None,
        horizon: StopCondition,
        recorder: Recorder,
    ) -> None:
        plan, first_step = set_up.plan, set_up.first_step
        self._scenario = scenario
        self._plan = plan
        self._adaptation = adaptation
        self._horizon = horizon
        self.recorder = recorder
        self._first_step = first_step
        self._steps = horizon.steps
        self._absences = noticed_absences(scenario.faults)
        self._ready_notice = scenario.effects.network.ready_notice
        compiled = compile_step(plan, scenario)
        self.actors = compiled.actors
        self._groups = {r.device: r.devices for p in plan.pipelines for s in p.stages for r in s.replicas}
        groups = [self._groups[actor] for actor in self.actors]
        self._devices = make_devices(groups, scenario)
        self._devices.clock_s[:] = [max(map(set_up.ready_at_s, group)) for group in groups]
        actor_of = {name: actor for actor, group in enumerate(groups) for name in group}
        self._moves = StateTransfer(set_up.moves, first_step, set_up.ready_at_s, actor_of)
        clocks_s: list[float] = [
            *self._devices.clock_s.tolist(),
            *(set_up.ready_at_s(move.source) for move in set_up.moves),
        ]
        self._begins_s = min(clocks_s)
        self.environment = simpy.Environment(self._begins_s)
        self.network = Network(
            self.environment,
            scenario,
            communicating_pairs(plan, scenario, changes=adaptation is not None)
            | {(move.source, move.target): True for move in set_up.moves},
            plan.connections,
            self._deliver,
            self._work,
        )
        self.partners = {leader: group[1:] for leader, group in self._groups.items() if group[1:]}
        self.under_way: dict[int, StepUnderWay] = {}
        self._dynamic: dict[int, DynamicStep] = {}
        self._known_steps = first_step + DECISION_LAG_STEPS if adaptation is not None else horizon.steps
        self._undecided: dict[int, list[int]] = {}
        self._unopened: dict[int, list[int]] = {}
        self._until_s = math.inf
        self._late: list[int] = []
        self._begun = False
        self.next_step = first_step
        edges = update_edges(plan, scenario)
        self.updates = Updates(edges, plan.synchronisation, self.actors)
        self._update_line = [self.network.number[edge.sender, edge.receiver] for edge in edges]
        self._posts = PostedReceives(first_step, self._step, self.network.send)
        self._ready: deque[tuple[int, list[int]]] = deque()
        self._working = False
        self.unfinished_actors = len(self.actors)
        self._bound_steps()

    def run(self, until_s: float = math.inf) -> None:
        """Begin, or go on, until nothing moves any more, or up to a time; steps that end later are not seen yet."""
        self._until_s = until_s
        self._begin()
        late, self._late = self._late, []
        for step in late:
            self._finish(step, self.under_way[step])
        self._work()
        if until_s == math.inf:
            self.environment.run()
        while self.environment.peek() < until_s:
            self.environment.step()

    def move(self) -> float:
        """Go on until all layers are where they belong; return when that was, seconds. No step is seen meanwhile."""
        self._until_s = -math.inf
        self._begin()
        self._work()
        while self._moves.waiting and self.environment.peek() < math.inf:
            self.environment.step()
        return max(self._moves.end_s, self._begins_s)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._moves.send(self.network)
            waiting = self._moves.waiting
            self._enter(self._first_step, [actor for actor in range(len(self.actors)) if actor not in waiting])

    @property
    def is_over(self) -> bool:
        """Whether everybody has finished the last step, before the time up to which this went on."""
        return not self.unfinished_actors and not self._late

    @property
    def now_s(self) -> float:
        """How far the run has come."""
        return max(float(self.environment.now), float(self._devices.clock_s.max()))

    @property
    def ended_s(self) -> dict[str, float]:
        """When each device had done all steps."""
        clocks_s = zip(self.actors, self._devices.clock_s.tolist(), strict=True)
        return {device: clock_s for actor, clock_s in clocks_s for device in self._groups[actor]}

    @property
    def waiting(self) -> list[str]:
        """Devices that have not finished the last step."""
        rest = {actor for under_way in self.under_way.values() for actor in under_way.working}
        rest |= {actor for actors in self._undecided.values() for actor in actors}
        rest |= {*self.updates.waiting, *self._moves.waiting}
        return [self.actors[actor] for actor in sorted(rest)] if self.unfinished_actors else []

    def _bound_steps(self) -> None:
        """End before a decision for which everything is set up anew."""
        start = self._adaptation.next_start(self._first_step) if self._adaptation is not None else None
        if start is not None:
            self._steps = min(self._steps, start.first_step)

    def _enter(self, step: int, actors: Sequence[int]) -> None:
        """Let actors begin a step, or wait until its plan is known, or until somebody else begins it in time."""
        if not actors:
            return
        if step == self._steps:
            self.unfinished_actors -= len(actors)
        elif step >= self._known_steps:
            self._undecided.setdefault(step, []).extend(actors)
        elif not self._horizon.allows(step, float(self._devices.clock_s[actors].min())):
            self._unopened.setdefault(step, []).extend(actors)
            self.unfinished_actors -= len(actors)
        else:
            if step in self._unopened:
                waiting = self._unopened.pop(step)
                self.unfinished_actors += len(waiting)
                actors = [*actors, *waiting]
            if self._update_line:
                actors = [actor for actor in actors if self._may_begin(step, actor)]
            under_way = self._step(step)
            under_way.begun_s[actors] = self._devices.clock_s[actors]
            for actor in actors if self._ready_notice else ():
                self._posts.begin(step, actor, float(self._devices.clock_s[actor]), self._known_steps, self._steps)
            dynamic = self._dynamic.get(step)
            if dynamic is None:
                self._ready.append((step, list(actors)))
            else:
                for actor in actors:
                    dynamic.begin(actor)

    def _may_begin(self, step: int, actor: int) -> bool:
        """Whether what an actor has received lets it begin a step; its clock moves to when it did."""
        begins_s = self.updates.begin(actor, step, float(self._devices.clock_s[actor]))
        if begins_s is None:
            return False
        self._devices.clock_s[actor] = begins_s
        return True

    def _step(self, step: int) -> StepUnderWay:
        if step not in self.under_way:
            plan = self._plan if self._adaptation is None else self._adaptation.plan_for(step)
            under_way = self.under_way[step] = begin_step(step, plan, self._scenario, self.network)
            if plan.order == "dynamic":
                self._dynamic[step] = self._choosing(step, plan, under_way)
        return self.under_way[step]

    def _choosing(self, step: int, plan: Plan, under_way: StepUnderWay) -> DynamicStep:
        """The devices of a step in which they choose for themselves."""

        def finish(actor: int) -> None:
            self._ready.append((step, [actor]))
            self._work()

        send = partial(self._send, step, under_way)
        lines = self.network.lines
        return DynamicStep(self.environment, plan, self._scenario, under_way, self._devices, lines, send, finish)

    def _work(self) -> None:
        """Let everybody who is ready go on, step by step, until all of them wait."""
        if self._working:
            return
        self._working = True
        while self._ready:
            step, actors = self._ready.popleft()
            while self._ready and self._ready[0][0] == step:
                actors += self._ready.popleft()[1]
            under_way = self.under_way[step]
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
                for edge, parcel in self.updates.finish(actor, float(self._devices.clock_s[actor])):
                    self.network.send(self._update_line[edge], parcel)
            self._enter(step + 1, finished)
            under_way.unfinished -= finished_count
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
        parcel = Message(step, message, size_bytes, float(under_way.state.sent_s[message]))
        if self._ready_notice:
            self._posts.send(under_way, int(graph.receiver[message]), line, parcel)
        else:
            self.network.send(line, parcel)

    def _deliver(self, parcel: Message, departed_s: float, arrived_s: float) -> None:
        if parcel in self._moves:
            self._settle(parcel, departed_s, arrived_s)
            return
        if parcel.message < 0:
            self._apply(parcel, departed_s, arrived_s)
            return
        under_way = self.under_way[parcel.step]
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

    def _settle(self, parcel: Message, departed_s: float, arrived_s: float) -> None:
        """Take layers that have arrived, and let the device begin that waited for nothing else."""
        self.recorder.add(self._moves.row(parcel, departed_s))
        actor = self._moves.arrive(parcel, arrived_s)
        if actor is not None:
            self._devices.clock_s[actor] = max(self._devices.clock_s[actor], arrived_s)
            self._enter(self._first_step, [actor])

    def _apply(self, parcel: Message, departed_s: float, arrived_s: float) -> None:
        """Take an update that another pipeline sent, and let those begin who waited for it."""
        self.recorder.add(self.updates.sent(parcel, departed_s))
        for step, actor in self.updates.arrive(parcel, arrived_s):
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
        over_s = math.inf
        if self._adaptation is not None:
            over_s = under_way.over_s
            if over_s > self._until_s:
                self._late.append(step)
                return
        del self.under_way[step]
        self._dynamic.pop(step, None)
        events = self.recorder.finish(step, under_way.compiled, under_way.state, self.partners)
        self.next_step = max(self.next_step, step + 1)
        if self._adaptation is None:
            return
        decision = self._adaptation.finish_step(step, events, known_away(self._absences, over_s))
        if decision is not None:
            self.recorder.decide(decision, over_s)
            self._bound_steps()
        self._known_steps = step + DECISION_LAG_STEPS + 1
        self._posts.learn(self._known_steps, self._steps, over_s)
        waiting = self._undecided.pop(step + DECISION_LAG_STEPS, [])
        self._devices.clock_s[waiting] = np.maximum(self._devices.clock_s[waiting], over_s)
        if waiting:
            self._enter(step + DECISION_LAG_STEPS, waiting)
