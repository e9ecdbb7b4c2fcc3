"""Workers and a syncer in one process; the test says which messages arrive when."""

from collections import deque
from collections.abc import Callable
from typing import cast

import torch

from executor.core.events import EventRecorder
from executor.core.messages import CheckpointMark
from executor.core.step_program import StepProgram, compile_plan
from executor.runtime.decoupled.common_layers import CommonLayers, News, Sent, States, Wanted
from executor.runtime.decoupled.updates import DecoupledUpdates
from executor.runtime.interpreter import Interpreter
from executor.runtime.outer.state import OuterState
from executor.training.flat_state import FlatParameters
from executor.training.models.loading import load_with_sizes
from executor.training.real_compute import Compute, RealCompute
from executor.transport.wire_format import UncheckedWire
from planner.cost.synchronisation import layer_elements
from planner.events.event import Event
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from tests.helpers.strategies.manual_transport import ManualNetwork, RowsKept, SetClock


class ManualLink:
    """A worker's end; what it sends, and what the syncer sends, waits for the test."""

    def __init__(self) -> None:
        self.up: deque[Sent] = deque()
        self.down: deque[News] = deque()
        self._arrived: list[News] = []
        self.wanted: list[Wanted] = []
        self.given: list[States] = []
        self.states: list[States] = []

    def send(self, sent: Sent, ready_s: float, departed: Callable[[float], None]) -> None:
        departed(ready_s)
        self.up.append(Sent(sent.layers, sent.payload.clone()))

    def take(self) -> list[News]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_states(self) -> list[States]:
        states, self.states = self.states, []
        return states

    def take_wanted(self) -> list[Wanted]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def give(self, device: str, states: States, ready_s: float, departed: Callable[[float], None]) -> None:
        departed(ready_s)
        self.given.append(states)

    def wait(self) -> None:
        assert self._arrived or self.states, "it would wait for ever"

    def mark(self, mark: CheckpointMark) -> None:
        """The test writes no checkpoints."""

    def end(self) -> None:
        """The test has delivered everything."""

    def await_end(self) -> None:
        """It waits for nothing."""

    def deliver(self) -> None:
        """The syncer's next message arrives."""
        self._arrived.append(self.down.popleft())


class ManualWorkers:
    """Pipelines of one device each, and one syncer, which has a device of its own."""

    def __init__(self, scenario: Scenario, plan: Plan) -> None:
        self.clock, self.events = SetClock(), list[Event]()
        self._scenario, self._plan = scenario, plan
        self._programs = compile_plan(plan, scenario)
        self._network = ManualNetwork(self.clock)
        self.devices = plan.devices
        count = len(self.devices)
        self.links = [ManualLink() for _ in range(count)]
        self.next = [0] * count
        self.computes: list[RealCompute] = [self._compute(device) for device in self.devices]
        self.interpreters = [self._interpreter(w, joins=False) for w in range(count)]
        assert scenario.code is not None
        layers = load_with_sizes(scenario.code, scenario.training.seed).model.layers
        ((_, elements),) = layer_elements(plan, scenario)[0].values()
        outer = plan.synchronisation.outer
        state = OuterState(outer, lambda layer: FlatParameters([layers[layer]]), elements, {})
        self.common = CommonLayers(outer, [pipeline.samples for pipeline in plan.pipelines], elements, state, {})

    def step(self, w: int) -> None:
        """A worker takes its next step."""
        step, plan = self.next[w], self._plan
        current = StepProgram(step, plan, self._programs[self.devices[w]], step * plan.global_batch)
        self.interpreters[w].run(current, lambda step: None, 0.0)
        self.interpreters[w].update()
        self.next[w] += 1

    def arrive(self, w: int) -> list[int]:
        """What a worker has sent arrives; the layers of the outer steps that are due then."""
        while self.links[w].up:
            self.common.arrive(self.devices[w], self.links[w].up.popleft(), self.clock.now_s())
        return self.merge(self.clock.now_s())

    def merge(self, until_s: float) -> list[int]:
        layers, _ = self.common.take_outer_steps(until_s)
        for w, link in enumerate(self.links if layers else ()):
            link.down.append(self.common.news(layers, w))
        return layers

    def deliver(self, w: int) -> None:
        """What the syncer has sent a worker arrives."""
        while self.links[w].down:
            self.links[w].deliver()

    def replace(self, w: int, giver: int) -> None:
        """A new process takes the place of a worker's; another one, which takes a step, gives it the layers' state."""
        self.links[w] = ManualLink()
        layers = tuple(self.common.layers)
        self.links[w].down.append(self.common.news(layers, w))
        self.deliver(w)
        self.links[giver].wanted.append(Wanted(self.devices[w], layers))
        self.step(giver)
        self.links[w].states = self.links[giver].given
        self.computes[w] = self._compute(self.devices[w])
        self.interpreters[w] = self._interpreter(w, joins=True)

    def finish(self) -> None:
        """Everything arrives, all workers end."""
        for w in range(len(self.devices)):
            self.arrive(w)
        self.merge(float("inf"))
        for w, interpreter in enumerate(self.interpreters):
            self.deliver(w)
            interpreter.close()

    def parameters(self, w: int) -> dict[str, torch.Tensor]:
        return {name: each.detach() for name, each in self.computes[w].named_parameters().items()}

    def layers(self, w: int) -> dict[int, torch.Tensor]:
        """The parameters of a worker, by layer."""
        compute, sizes = (
            self.computes[w],
            {layer: self.common.parameters(layer).numel() for layer in self.common.layers},
        )
        return {layer: compute.flat_parameters(layer, layer + 1, size).parameters() for layer, size in sizes.items()}

    def _compute(self, device: str) -> RealCompute:
        assert self._scenario.code is not None
        training = self._scenario.training
        loaded = load_with_sizes(self._scenario.code, training.seed, training.precision)
        return RealCompute(loaded, self._plan, self._programs[device], training, self.clock)

    def _interpreter(self, w: int, *, joins: bool) -> Interpreter:
        device, compute = self.devices[w], cast(Compute, self.computes[w])
        rows, transport = cast(EventRecorder, RowsKept(self.events)), self._network.transport(device)
        links = dict.fromkeys(self._plan.synchronisation.outer.syncers, self.links[w])
        updates = DecoupledUpdates(
            self._plan, self._scenario, device, self.next[w], joins, links, transport, compute, self.clock, rows, {}
        )
        common = (self._scenario, transport, compute, self.clock, lambda plan: UncheckedWire(), rows, updates)
        return Interpreter(*common, lambda *_: None)
