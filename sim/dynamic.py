"""Devices that choose: of the actions that are ready, each takes the best one, with no plan for the whole.

The rule is that of `planner.schedules.dynamic`, as the executor follows it. It absorbs jitter, but every choice
needs an event.
"""

from collections.abc import Callable
from dataclasses import dataclass

import simpy

from planner.cost.stage import scheduling_problems
from planner.plan.actions import Action
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.schedules.dynamic import DynamicChoice
from planner.schedules.kernel.problem import KINDS
from planner.step.tables import SYNC
from sim.kernel.advance import Devices, Lines, occupied, transmit
from sim.kernel.timer import Timer
from sim.step import StepUnderWay


@dataclass(eq=False, slots=True)
class _Actor:
    """One actor's step.

    Attributes:
        choice: What is ready, and what is best of it.
        number: Actions by what they are, to their number in the graph.
        busy: Whether it is at work, or has not begun.
    """

    choice: DynamicChoice
    number: dict[Action, int]
    busy: bool = True


class DynamicStep:
    """One step of all actors.

    Args:
        environment: The clock.
        plan: Of the step.
        scenario: What it is for.
        under_way: The step.
        devices: Whose clocks it moves.
        lines: Over which messages go.
        send: Called with each message that the lines do not carry by themselves, when it is handed over.
        finished: Called with each actor that has done its last action, at that time.
    """

    def __init__(
        self,
        environment: simpy.Environment,
        plan: Plan,
        scenario: Scenario,
        under_way: StepUnderWay,
        devices: Devices,
        lines: Lines,
        send: Callable[[int], None],
        finished: Callable[[int], None],
    ) -> None:
        self._environment = environment
        self._under_way = under_way
        self._devices = devices
        self._lines = lines
        self._send = send
        self._finished = finished
        problems = scheduling_problems(plan, scenario)
        actions = under_way.compiled.actions
        kinds, places = actions.kind.tolist(), zip(actions.stage.tolist(), actions.microbatch.tolist(), strict=True)
        # Sums of gradients and updates come in a fixed order, and are not chosen.
        self._action = [
            Action(stage, KINDS[kind], microbatch) if kind < SYNC else None
            for kind, (stage, microbatch) in zip(kinds, places, strict=True)
        ]
        self._actor_of = actions.actor.tolist()
        compiled, graph = under_way.compiled, under_way.compiled.graph
        self._actors: list[_Actor] = []
        for actor in range(graph.actors):
            pipeline = int(compiled.pipeline[actor])
            worker = plan.pipelines[pipeline].workers[int(compiled.stage[actor])]
            own = range(*graph.first_action[actor : actor + 2].tolist())
            number = {action: index for index in own if (action := self._action[index]) is not None}
            messages = {action: len(self._received(index)) for action, index in number.items()}
            self._actors.append(_Actor(DynamicChoice(problems[pipeline], worker, messages), number))

    def begin(self, actor: int) -> None:
        """Let an actor work from its clock on."""
        Timer(self._environment, float(self._devices.clock_s[actor]), lambda alarm: self._go_on(actor, alarm))

    def arrive(self, message: int) -> None:
        """Take note that a message's arrival is known; it counts from then on."""
        if self._action[self._receiver(message)] is None:
            return
        arrival_s = float(self._under_way.state.arrival_s[message])
        Timer(self._environment, arrival_s, lambda alarm: self._arrived(message, alarm))

    def _arrived(self, message: int, alarm: Timer) -> None:
        receiver = self._receiver(message)
        number, action = self._actor_of[receiver], self._action[receiver]
        assert action is not None
        actor = self._actors[number]
        actor.choice.arrive(action)
        if not actor.busy:
            actor.busy = True
            self._go_on(number, alarm)

    def _receiver(self, message: int) -> int:
        return int(self._under_way.compiled.messages.receiver[message])

    def _go_on(self, number: int, alarm: Timer) -> None:
        """Choose when everything else of this time has happened, since more may be ready then; or have finished.

        A replica whose share of every microbatch is empty has nothing to do.
        """
        actor = self._actors[number]
        if actor.choice.remaining:
            Timer(self._environment, alarm.time_s, lambda _: self._choose(number, alarm.time_s), after_alarms=True)
            return
        first = int(self._under_way.compiled.graph.first_action[number])
        self._under_way.state.position[number] = first + len(actor.number)
        self._finished(number)

    def _choose(self, number: int, now_s: float) -> None:
        actor = self._actors[number]
        chosen = actor.choice.best()
        if chosen is None:
            actor.busy = False
            return
        action, state = actor.number[chosen], self._under_way.state
        duration_s = float(self._under_way.times.duration_s[action])
        start_s, end_s = occupied(self._devices, number, now_s, duration_s)
        if start_s > now_s:
            # It is away, or leaves before this is done: it chooses when it is back, from what is ready then.
            if start_s < float("inf"):
                Timer(self._environment, start_s, lambda alarm: self._go_on(number, alarm))
            return
        actor.choice.start(chosen)
        state.start_s[action], state.end_s[action] = start_s, end_s
        for message in self._received(action):
            # It waited for this message if it stood idle before it came.
            idle_since_s = float(self._devices.clock_s[number])
            state.wait_s[message] = idle_since_s if now_s > idle_since_s else state.arrival_s[message]
        if end_s < float("inf"):
            Timer(self._environment, end_s, lambda alarm: self._done(number, chosen, alarm))

    def _received(self, action: int) -> list[int]:
        graph = self._under_way.compiled.graph
        received: list[int] = graph.received[graph.first_received[action] : graph.first_received[action + 1]].tolist()
        return received

    def _done(self, number: int, chosen: Action, alarm: Timer) -> None:
        actor, graph = self._actors[number], self._under_way.compiled.graph
        times, state = self._under_way.times, self._under_way.state
        self._devices.clock_s[number] = alarm.time_s
        action = actor.number[chosen]
        for message in range(graph.first_sent[action], graph.first_sent[action + 1]):
            if transmit(graph, times, self._lines, state, message, alarm.time_s):
                self.arrive(message)
            else:
                self._send(message)
        actor.choice.finish(chosen)
        self._go_on(number, alarm)
