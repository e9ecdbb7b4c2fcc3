"""Devices that choose: of the actions that are ready, each takes the best one, with no plan for the whole.

The rule is that of `planner.schedules.dynamic`: gradients before forwards, which wait while the stage's depth or the
device's memory is used up, less room for a microbatch of each of its later stages and for what a backward recomputes;
weight gradients where nothing else is ready, where memory holds up the only forward, or before a gradient that
recomputes more than fits. Of equals the earliest microbatch goes first, then the latest stage. It absorbs jitter, but
every choice needs an event.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import simpy

from planner.pipeline_costs import scheduling_problem
from planner.plan import Plan
from planner.scenario import Scenario
from planner.schedules.orders import BACKWARD_WEIGHT, FORWARD
from planner.schedules.problem import SchedulingProblem
from planner.step_tables import SYNC
from sim.advance import Devices, occupied
from sim.alarm import Alarm
from sim.steps import StepUnderWay


@dataclass(eq=False, slots=True)
class _Actor:
    """One actor's step.

    Attributes:
        problem: Of its pipeline.
        worker: Who it is there.
        lacking: For each action that is not done, the messages and own actions that it still waits for.
        ready: Actions that lack nothing.
        busy: Whether it is at work, or has not begun.
        live: Microbatches of each stage between the start of F and the end of I or B.
        held_bytes: Activations of each stage.
        largest_bytes: Those of the largest microbatch, of each stage that it holds.
        reserve_bytes: What the backward that recomputes the most takes.
    """

    problem: SchedulingProblem
    worker: int
    lacking: dict[int, int]
    largest_bytes: Mapping[int, float]
    reserve_bytes: float
    ready: set[int] = field(default_factory=set)
    busy: bool = True
    live: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    held_bytes: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


class DynamicStep:
    """One step of all actors.

    Args:
        environment: The clock.
        plan: Of the step.
        scenario: What it is for.
        under_way: The step.
        devices: Whose clocks it moves.
        hand_over: Called with each message at the time when it is handed over.
        finished: Called with each actor that has done its last action, at that time.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        plan: Plan,
        scenario: Scenario,
        under_way: StepUnderWay,
        devices: Devices,
        hand_over: Callable[[int, float], None],
        finished: Callable[[int], None],
    ) -> None:
        self._environment = environment
        self._under_way = under_way
        self._devices = devices
        self._hand_over = hand_over
        self._finished = finished
        self._problems = [scheduling_problem(pipeline, scenario, plan.compression) for pipeline in plan.pipelines]
        self._worker_of = [pipeline.workers for pipeline in plan.pipelines]
        actions = under_way.compiled.actions
        self._kind, self._stage = actions.kind.tolist(), actions.stage.tolist()
        self._microbatch, self._pipeline = actions.microbatch.tolist(), actions.pipeline.tolist()
        self._actor_of = actions.actor.tolist()
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        self._actors: dict[int, _Actor] = {}
        for actor in range(under_way.compiled.graph.actors):
            self._actors[actor] = self._prepare(actor)

    def _prepare(self, actor: int) -> _Actor:
        graph = self._under_way.compiled.graph
        first, end = graph.first_action[actor : actor + 2].tolist()
        own = [action for action in range(first, end) if self._kind[action] < SYNC]
        number = {(self._role(a), self._stage[a], self._microbatch[a]): a for a in own}
        lacking = {}
        for action in own:
            role, stage, microbatch = self._role(action), self._stage[action], self._microbatch[action]
            before = {
                "F": [("F", stage - 1, microbatch)],
                "B": [("F", stage, microbatch), ("B", stage + 1, microbatch)],
                "W": [("B", stage, microbatch)],
            }[role]
            waits = [number[key] for key in before if key in number]
            for other in waits:
                self._followers[other].append(action)
            lacking[action] = len(waits) + int(graph.first_received[action + 1] - graph.first_received[action])
        pipeline = int(self._under_way.compiled.pipeline[actor])
        stage = int(self._under_way.compiled.stage[actor])
        problem, worker = self._problems[pipeline], self._worker_of[pipeline][stage]
        largest_bytes = {stage: float(problem.activation_bytes[stage].max()) for stage in problem.stages_of(worker)}
        prepared = _Actor(problem, worker, lacking, largest_bytes, float(problem.reserve_bytes[worker]))
        prepared.ready = {action for action, count in lacking.items() if not count}
        return prepared

    def _role(self, action: int) -> str:
        kind = self._kind[action]
        return "F" if kind == FORWARD else "W" if kind == BACKWARD_WEIGHT else "B"

    def begin(self, actor: int) -> None:
        """Let an actor work from its clock on."""
        Alarm(self._environment, float(self._devices.clock_s[actor]), lambda alarm: self._go_on(actor, alarm))

    def arrive(self, message: int) -> None:
        """Take note that a message's arrival is known; it counts from then on."""
        state = self._under_way.state
        if self._kind[int(self._under_way.compiled.messages.receiver[message])] >= SYNC:
            # Gradient sums come in a fixed order, and do not choose.
            return
        Alarm(self._environment, float(state.arrival_s[message]), lambda alarm: self._arrived(message, alarm))

    def _arrived(self, message: int, alarm: Alarm) -> None:
        receiver = int(self._under_way.compiled.messages.receiver[message])
        actor = self._actor_of[receiver]
        self._supply(receiver)
        if not self._actors[actor].busy:
            self._actors[actor].busy = True
            self._go_on(actor, alarm)

    def _supply(self, action: int) -> None:
        """Give an action one of the things that it lacks."""
        actor = self._actors[self._actor_of[action]]
        actor.lacking[action] -= 1
        if not actor.lacking[action]:
            actor.ready.add(action)

    def _go_on(self, number: int, alarm: Alarm) -> None:
        """Choose when everything else of this time has happened, since more may be ready then; or have finished.

        A replica whose share of every microbatch is empty has nothing to do.
        """
        if self._actors[number].lacking:
            Alarm(self._environment, alarm.time_s, lambda _: self._choose(number, alarm.time_s), after_alarms=True)
            return
        first, end = self._under_way.compiled.graph.first_action[number : number + 2].tolist()
        done = [action for action in range(first, end) if self._kind[action] < SYNC]
        self._under_way.state.position[number] = first + len(done)
        self._finished(number)

    def _choose(self, number: int, now_s: float) -> None:
        actor = self._actors[number]
        action = self._best(actor)
        if action is None:
            actor.busy = False
            return
        state = self._under_way.state
        duration_s = float(self._under_way.times.duration_s[action])
        start_s, end_s = occupied(self._devices, number, now_s, duration_s)
        if start_s > now_s:
            # It is away, or leaves before this is done: it chooses when it is back, from what is ready then.
            if start_s < float("inf"):
                Alarm(self._environment, start_s, lambda alarm: self._go_on(number, alarm))
            return
        actor.ready.discard(action)
        state.start_s[action], state.end_s[action] = start_s, end_s
        for message in self._received(action):
            # It waited for this message if it stood idle before it came.
            idle_since_s = float(self._devices.clock_s[number])
            state.wait_s[message] = idle_since_s if now_s > idle_since_s else state.arrival_s[message]
        if self._role(action) == "F":
            actor.live[self._stage[action]] += 1
            actor.held_bytes[self._stage[action]] += actor.problem.activation_bytes[
                self._stage[action], self._microbatch[action]
            ]
        if end_s < float("inf"):
            Alarm(self._environment, end_s, lambda alarm: self._done(number, action, alarm))

    def _received(self, action: int) -> list[int]:
        graph = self._under_way.compiled.graph
        received: list[int] = graph.received[graph.first_received[action] : graph.first_received[action + 1]].tolist()
        return received

    def _best(self, actor: _Actor) -> int | None:
        """The best action that is ready and allowed."""

        def rank(action: int) -> tuple[int, int]:
            return self._microbatch[action], -self._stage[action]

        gradients = [action for action in actor.ready if self._role(action) == "B"]
        forwards = [action for action in actor.ready if self._role(action) == "F" and self._allowed(actor, action)]
        weights = [action for action in actor.ready if self._role(action) == "W"]
        if gradients and weights and not self._has_room(actor, min(gradients, key=rank)):
            return min(weights, key=rank)
        for choice in (gradients, forwards, weights):
            if choice:
                return min(choice, key=rank)
        return None

    def _has_room(self, actor: _Actor, action: int) -> bool:
        """Whether what a gradient recomputes fits into memory; it does where no weight gradient is pending."""
        if not actor.reserve_bytes:
            return True
        place = self._stage[action], self._microbatch[action]
        room_bytes = float(actor.problem.capacity_bytes[actor.worker]) - sum(actor.held_bytes.values())
        return bool(actor.problem.weight_bytes[place] - actor.problem.activation_bytes[place] <= room_bytes)

    def _allowed(self, actor: _Actor, action: int) -> bool:
        """Whether depth and memory let a forward start, with room kept for a microbatch of every later stage."""
        stage, problem = self._stage[action], actor.problem
        if actor.live[stage] >= problem.in_flight[stage]:
            return False
        room_bytes = float(problem.capacity_bytes[actor.worker] - actor.reserve_bytes)
        for other, largest_bytes in actor.largest_bytes.items():
            room_bytes -= max(actor.held_bytes[other], largest_bytes if other > stage else 0.0)
        return bool(problem.activation_bytes[stage, self._microbatch[action]] <= room_bytes)

    def _done(self, number: int, action: int, alarm: Alarm) -> None:
        actor, role = self._actors[number], self._role(action)
        stage, microbatch = self._stage[action], self._microbatch[action]
        del actor.lacking[action]
        self._devices.clock_s[number] = alarm.time_s
        kept = actor.problem.weight_bytes[stage, microbatch] if role != "F" else 0.0
        if role == "B":
            actor.live[stage] -= 1
            split = any(self._role(each) == "W" for each in self._followers[action])
            actor.held_bytes[stage] -= actor.problem.activation_bytes[stage, microbatch] - (kept if split else 0.0)
        elif role == "W":
            actor.held_bytes[stage] -= kept
        graph = self._under_way.compiled.graph
        for message in range(graph.first_sent[action], graph.first_sent[action + 1]):
            self._hand_over(message, alarm.time_s)
        for follower in self._followers[action]:
            self._supply(follower)
        self._go_on(number, alarm)
