"""Steps with the dynamic order, in which each device chooses among the actions that are ready.

Devices choose by the rule in `planner.schedules.dynamic`, as in the executor. A dynamic order absorbs jitter, but every
choice needs a SimPy event.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass

import simpy

from planner.cost.stage import scheduling_problems
from planner.plan.actions import Action
from planner.scenario.scenario import Scenario
from planner.schedules.dynamic import SAME_MOMENT_S, DynamicChoice
from planner.schedules.kernel.problem import KINDS
from planner.step.tables import SYNC
from sim.kernel.advance import Devices, Lines, occupied, transmit
from sim.kernel.events import Timer
from sim.step import StepRun


@dataclass(eq=False, slots=True)
class _Actor:
    """The step of one actor.

    Attributes:
        choice: The remaining actions, and the rule that chooses the next one.
        number: Index of each of these actions in the step's graph.
        busy: Whether the actor carries out an action, or has not begun the step.
    """

    choice: DynamicChoice
    number: dict[Action, int]
    busy: bool = True


@dataclass(eq=False)
class DynamicStep:
    """One step in which all actors choose their actions.

    Args:
        devices: Devices of the actors, whose clocks the step moves.
        unsent: Queue of pairs (step, message) for messages on shared lines, which connections have to send.
        ready: Queue of pairs (step, actors) for actors that have done all actions they choose from.
    """

    _environment: simpy.Environment
    scenario: InitVar[Scenario]
    _step: StepRun
    _devices: Devices
    _lines: Lines
    _unsent: deque[tuple[StepRun, int]]
    _ready: deque[tuple[int, list[int]]]

    def __post_init__(self, scenario: Scenario) -> None:
        actions = self._step.compiled.actions
        kinds, places = actions.kind.tolist(), zip(actions.stage.tolist(), actions.microbatch.tolist(), strict=True)
        # Gradient sums and parameter updates have a fixed order.
        self._action = [
            Action(stage, KINDS[kind], microbatch) if kind < SYNC else None
            for kind, (stage, microbatch) in zip(kinds, places, strict=True)
        ]
        problems = scheduling_problems(self._step.plan, scenario)
        compiled, graph = self._step.compiled, self._step.compiled.graph
        self._actors: list[_Actor] = []
        for actor in range(graph.actors):
            pipeline = int(compiled.pipeline[actor])
            worker = self._step.plan.pipelines[pipeline].workers[int(compiled.stage[actor])]
            own = range(*graph.first_action[actor : actor + 2].tolist())
            number = {action: index for index in own if (action := self._action[index]) is not None}
            messages = {action: len(self._received(index)) for action, index in number.items()}
            self._actors.append(_Actor(DynamicChoice(problems[pipeline], worker, messages), number))
        self._there_s = [0.0] * len(self._action)

    def begin(self, actor: int) -> None:
        """Let an actor work from its clock on."""
        self._at(float(self._devices.clock_s[actor]), lambda now_s: self._go_on(actor, now_s))

    def arrive(self, message: int) -> None:
        """Let the receiving actor process a message at its arrival, whose time is known."""
        if self._action[self._receiver(message)] is not None:
            arrival_s = float(self._step.state.arrival_s[message])
            self._at(arrival_s, lambda now_s: self._copy_in(message, now_s))

    def _at(self, time_s: float, act: Callable[[float], None], *, late: bool = False) -> None:
        Timer(self._environment, time_s, lambda timer: act(timer.time_s), late=late)

    def _copy_in(self, message: int, now_s: float) -> None:
        """Copy an arrived message from the host, after those that arrived before it."""
        copied_s, actor = self._devices.copied_in_s, int(self._step.compiled.actions.actor[self._receiver(message)])
        copied_s[actor] = max(now_s, copied_s[actor]) + self._step.times.copy_in_s[message]
        if copied_s[actor] > now_s:
            self._at(float(copied_s[actor]), lambda now_s: self._arrived(message, now_s))
        else:
            self._arrived(message, now_s)

    def _arrived(self, message: int, now_s: float) -> None:
        receiver = self._receiver(message)
        number, action = int(self._step.compiled.actions.actor[receiver]), self._action[receiver]
        assert action is not None
        actor = self._actors[number]
        self._there_s[receiver] = now_s
        actor.choice.arrive(action)
        if not actor.busy:
            actor.busy = True
            self._go_on(number, now_s)

    def _receiver(self, message: int) -> int:
        return int(self._step.compiled.messages.receiver[message])

    def _received(self, action: int) -> list[int]:
        graph = self._step.compiled.graph
        received: list[int] = graph.received[graph.first_received[action] : graph.first_received[action + 1]].tolist()
        return received

    def _go_on(self, number: int, now_s: float) -> None:
        """Let an actor choose after all other events of this moment, which may make further actions ready.

        An actor without remaining actions is put into the queue ``ready`` for the rest of the step, whose order is
        fixed. A replica that takes no samples of any microbatch never has any action to choose.
        """
        actor = self._actors[number]
        if actor.choice.remaining:
            self._at(now_s + SAME_MOMENT_S, lambda _: self._choose(number, now_s), late=True)
            return
        first = int(self._step.compiled.graph.first_action[number])
        self._step.state.position[number] = first + len(actor.number)
        self._ready.append((self._step.number, [number]))

    def _choose(self, number: int, now_s: float) -> None:
        actor = self._actors[number]
        chosen = actor.choice.best()
        if chosen is None:
            actor.busy = False
            return
        action, state = actor.number[chosen], self._step.state
        # The last input may arrive within `SAME_MOMENT_S` from now.
        ready_s = max(now_s, self._there_s[action])
        start_s, end_s = occupied(self._devices, number, ready_s, float(self._step.times.duration_s[action]))
        if start_s > ready_s:
            # The device is absent, or leaves before the action ends; the actor chooses again when the device returns.
            if start_s < float("inf"):
                self._at(start_s, lambda now_s: self._go_on(number, now_s))
            return
        actor.choice.start(chosen)
        state.start_s[action], state.end_s[action] = start_s, end_s
        for message in self._received(action):
            # The actor waited for this message if it became idle before the message arrived.
            idle_since_s = float(self._devices.clock_s[number])
            state.wait_s[message] = idle_since_s if ready_s > idle_since_s else state.arrival_s[message]
        if end_s < float("inf"):
            self._at(end_s, lambda now_s: self._done(number, chosen, now_s))

    def _done(self, number: int, chosen: Action, now_s: float) -> None:
        actor, graph, state = self._actors[number], self._step.compiled.graph, self._step.state
        self._devices.clock_s[number] = now_s
        action = actor.number[chosen]
        for message in range(graph.first_sent[action], graph.first_sent[action + 1]):
            if transmit(graph, self._step.times, self._lines, self._devices, state, number, message, now_s):
                self.arrive(message)
            else:
                self._unsent.append((self._step, message))
        actor.choice.finish(chosen)
        self._go_on(number, now_s)
