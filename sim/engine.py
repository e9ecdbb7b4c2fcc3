"""Carries out steps: advances devices as far as their inputs allow, sends their messages and records arrivals.

A device may be ahead of SimPy's clock, as long as the times of its actions follow from known arrivals. SimPy's clock
advances only for messages on links that several connections share, and for devices with a dynamic order.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from planner.scenario.scenario import Scenario
from sim.dynamic import DynamicStep
from sim.kernel.advance import SHARED, Devices, advance
from sim.network.connection import Message
from sim.network.network import Network
from sim.step import StepRun, StepRuns
from sim.step_gate import StepGate


class PostedReceives:
    """The times at which devices post their receives, and the messages whose senders wait for posted receives.

    A device posts the receives of step k + 1 when it starts step k or, if this is later, when the plan of step k + 1
    becomes known.
    """

    def __init__(self, steps: StepRuns, gate: StepGate, network: Network) -> None:
        self._steps = steps
        self._gate = gate
        self._network = network
        # Steps and actors whose receives are posted as soon as the step's plan is known, but not before a time in s.
        self._unplanned: list[tuple[int, int, float]] = []

    def start_step(self, step: int, actor: int, now_s: float) -> None:
        """Post the next step's receives for an actor that starts a step, or defer them until the next plan is known."""
        if step == self._gate.first_step:
            self._post(step, actor, now_s)
        if step + 1 < min(self._gate.known_steps, self._gate.end_step):
            self._post(step + 1, actor, now_s)
        elif step + 1 < self._gate.end_step:
            self._unplanned.append((step + 1, actor, now_s))

    def post_planned(self) -> None:
        """Post the deferred receives of steps whose plan has become known."""
        planned = [each for each in self._unplanned if each[0] < self._gate.known_steps]
        self._unplanned = [each for each in self._unplanned if each[0] >= self._gate.known_steps]
        for step, actor, ready_s in planned:
            if step < self._gate.end_step:
                self._post(step, actor, ready_s)

    def is_posted(self, message: Message, receiver: int, line: int) -> bool:
        """Return whether a message's receive is posted; if not, queue the message until the receive is posted."""
        step = self._steps[message.step]
        message.posted_s = float(step.posted_s[receiver])
        if not np.isnan(message.posted_s):
            return True
        step.unposted.setdefault(receiver, []).append((line, message))
        return False

    def _post(self, step: int, actor: int, ready_s: float) -> None:
        """Post a step's receives at ``ready_s`` or, if this is later, when the step's plan becomes known."""
        step_run, posted_s = self._steps[step], max(ready_s, self._gate.known_s.get(step, ready_s))
        step_run.posted_s[actor] = posted_s
        for line, message in step_run.unposted.pop(actor, ()):
            message.posted_s = posted_s
            self._network.connections[line].send(message)


@dataclass(eq=False)
class StepEngine:
    """Carries out the steps that have begun and are not finished.

    Args:
        receives: Receives that devices post; None if senders do not wait for posted receives.
    """

    _environment: simpy.Environment
    _scenario: Scenario
    _network: Network
    _devices: Devices
    _steps: StepRuns
    _receives: PostedReceives | None

    def __post_init__(self) -> None:
        self._dynamic: dict[int, DynamicStep] = {}
        self._ready: deque[tuple[int, list[int]]] = deque()
        self._unsent: deque[tuple[StepRun, int]] = deque()

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has messages to send or actors to advance."""
        return bool(self._ready or self._unsent)

    def start(self, number: int, actors: Sequence[int]) -> None:
        """Let actors start a step at their clocks."""
        step = self._steps[number]
        step.begun_s[actors] = self._devices.clock_s[actors]
        if self._receives is not None:
            for actor in actors:
                self._receives.start_step(number, actor, float(self._devices.clock_s[actor]))
        if step.plan.order != "dynamic":
            self._ready.append((number, list(actors)))
            return
        if number not in self._dynamic:
            self._dynamic[number] = DynamicStep(
                self._environment, self._scenario, step, self._devices, self._network.lines, self._unsent, self._ready
            )
        for actor in actors:
            self._dynamic[number].begin(actor)

    def advance(self) -> Iterator[tuple[int, list[int]]]:
        """Advance all ready actors until each waits; yield each step with the actors that have finished it.

        The caller may start further steps between two yields.
        """
        while self._unsent:
            self._send(*self._unsent.popleft())
        while self._ready:
            number, actors = self._ready.popleft()
            while self._ready and self._ready[0][0] == number:
                actors += self._ready.popleft()[1]
            step = self._steps[number]
            unsent_count, finished_count = advance(
                step.compiled.graph,
                step.times,
                self._network.lines,
                self._devices,
                step.state,
                np.array(actors, np.int64),
            )
            for message in step.state.unsent[:unsent_count].tolist() if unsent_count else ():
                self._send(step, message)
            if finished_count:
                yield number, step.state.finished[:finished_count].tolist()

    def arrive(self, message: Message) -> StepRun:
        """Record the departure and arrival times of a message; return its step."""
        step, number = self._steps[message.step], message.number
        state, dynamic = step.state, self._dynamic.get(step.number)
        state.departed_s[number] = message.departed_s
        state.arrival_s[number] = message.arrived_s
        waiting = int(state.waiting[number])
        if waiting >= 0:
            state.waiting[number] = -1
            self._ready.append((step.number, [waiting]))
        elif dynamic is not None:
            dynamic.arrive(number)
        if step.times.blocking[number]:
            self._unblock(step, message)
        step.unfinished -= 1
        return step

    def forget(self, number: int) -> None:
        """Drop a finished step."""
        del self._steps[number]
        self._dynamic.pop(number, None)

    def _send(self, step: StepRun, message: int) -> None:
        graph = step.compiled.graph
        line = int(step.times.line[graph.channel[message]])
        if self._network.lines.mode[line] != SHARED:
            # The rate of this exclusive line stays at zero: the receiver waits for ever, and the run stalls.
            return
        step.unfinished += 1
        messages = step.compiled.messages
        size_bytes, flows = int(messages.size_bytes[message]), int(messages.flows[message])
        sent = Message(step.number, message, size_bytes, float(step.state.sent_s[message]), flows=flows)
        if self._receives is None or self._receives.is_posted(sent, int(graph.receiver[message]), line):
            self._network.connections[line].send(sent)

    def _unblock(self, step: StepRun, message: Message) -> None:
        """Let the sender of a departed message continue, where senders block until their messages have departed."""
        actor = int(step.compiled.actions.actor[step.compiled.messages.sender[message.number]])
        self._devices.clock_s[actor] = max(self._devices.clock_s[actor], message.departed_s)
        step.state.sending[actor] -= 1
        if not step.state.sending[actor]:
            self._ready.append((step.number, [actor]))
