"""Interpreters of several pipelines in one process; the test says which messages arrive when."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.core.step_program import StepProgram, compile_plan
from executor.runtime.async_updates import PipelineUpdates
from executor.runtime.interpreter import Interpreter
from executor.runtime.outer.updates import OuterUpdates
from executor.training.models.loading import load_with_sizes
from executor.training.real_compute import Compute, RealCompute
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import UncheckedWire
from planner.cost.synchronisation import update_edges
from planner.events.event import Event
from planner.plan.exchange_steps import Exchanges
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


class SetClock(RunClock):
    """Shows what it is set to."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.shows_s = 0.0

    def now_s(self) -> float:
        return self.shows_s


class _Handle:
    """A receive."""

    def __init__(self, arrived: Callable[[RecvHandle], None]) -> None:
        self._arrived = arrived
        self._payload: torch.Tensor | None = None
        self.arrived_s = float("inf")
        self.lost = False

    @property
    def is_complete(self) -> bool:
        return self._payload is not None

    def wait(self) -> torch.Tensor:
        assert self._payload is not None, "it has not arrived"
        return self._payload

    def complete(self, payload: torch.Tensor, now_s: float) -> None:
        self._payload, self.arrived_s = payload.clone(), now_s
        self._arrived(cast(RecvHandle, self))


class ManualNetwork:
    """Between devices: keeps messages until they are delivered."""

    def __init__(self, clock: SetClock) -> None:
        self._clock = clock
        self._sent: defaultdict[tuple[str, str], deque[tuple[int, torch.Tensor]]] = defaultdict(deque)
        self._posted: defaultdict[tuple[str, str, int], deque[_Handle]] = defaultdict(deque)

    def transport(self, device: str) -> Transport:
        """A device's access."""
        return cast(Transport, _DeviceTransport(device, self))

    def post(self, source: str, target: str, tag: int, arrived: Callable[[RecvHandle], None]) -> _Handle:
        handle = _Handle(arrived)
        self._posted[source, target, tag].append(handle)
        return handle

    def send(self, source: str, target: str, tag: int, payload: torch.Tensor) -> None:
        self._sent[source, target].append((tag, payload))

    def waiting(self, source: str, target: str) -> int:
        """Messages under way."""
        return len(self._sent[source, target])

    def deliver(self, source: str, target: str) -> None:
        """The next message arrives."""
        tag, payload = self._sent[source, target].popleft()
        self._posted[source, target, tag].popleft().complete(payload, self._clock.now_s())

    def deliver_all(self) -> None:
        """Also those that are sent when others arrive."""
        while pairs := [pair for pair, messages in self._sent.items() if messages]:
            self.deliver(*pairs[0])


class _DeviceTransport:
    def __init__(self, device: str, network: ManualNetwork) -> None:
        self._device = device
        self._network = network

    def post(
        self,
        source: str,
        tag: int,
        size_bytes: int,
        arrived: Callable[[RecvHandle], None],
        *,
        between_stages: bool = False,
    ) -> _Handle:
        return self._network.post(source, self._device, tag, arrived)

    def send(
        self, target: str, tag: int, payload: torch.Tensor, ready_s: float, departed: Callable[[float], None]
    ) -> None:
        self._network.send(self._device, target, tag, payload)
        departed(ready_s)


class RowsKept:
    """Keeps rows."""

    def __init__(self, events: list[Event]) -> None:
        self.log = events.append

    def hold(self, step: int) -> Callable[[], None]:
        return lambda: None

    def sending(self, step: int, row: Callable[[float, float], Event], start_s: float) -> Callable[[float], None]:
        return lambda end_s: self.log(row(start_s, end_s))


class Pipelines:
    """Pipelines of one device each."""

    def __init__(self, scenario: Scenario, plan: Plan, steps: int, settle_every: int = 0) -> None:
        assert scenario.code is not None
        exchanges = Exchanges(plan.synchronisation.interval_steps, 0, steps, settle_every)
        self.clock = SetClock()
        self.network = ManualNetwork(self.clock)
        self.events: list[Event] = []
        self.devices = plan.devices
        self._plan = plan
        self._programs = compile_plan(plan, scenario)
        self.computes, self.interpreters, self._next = [], [], [0] * len(self.devices)
        edges = update_edges(plan, scenario)
        rows = cast(EventRecorder, RowsKept(self.events))
        for device in self.devices:
            loaded = load_with_sizes(scenario.code, scenario.training.seed, scenario.training.precision)
            compute = RealCompute(loaded, plan, self._programs[device], scenario.training, self.clock)
            transport = self.network.transport(device)
            common = (transport, cast(Compute, compute), scenario.model, self.clock, rows)
            updates: PipelineUpdates | OuterUpdates
            if plan.synchronisation.has_outer_step:
                updates = OuterUpdates(plan, partial(update_edges, scenario=scenario), device, 0, steps, *common, {})
            else:
                updates = PipelineUpdates(plan, edges, device, exchanges, *common)
            self.computes.append(compute)
            self.interpreters.append(
                Interpreter(
                    scenario,
                    transport,
                    compute,
                    self.clock,
                    lambda plan: UncheckedWire(),
                    rows,
                    updates,
                    lambda *_: None,
                )
            )

    def step(self, p: int) -> None:
        """A pipeline carries out its next step."""
        step, plan = self._next[p], self._plan
        current = StepProgram(step, plan, self._programs[self.devices[p]], step * plan.global_batch)
        self.interpreters[p].run(current, lambda step: None, 0.0)
        # Where gradients are clipped the update waits for the norm, until the next step begins.
        self.interpreters[p].update()
        self._next[p] += 1

    def deliver(self, sender: int, receiver: int, messages: int = 1) -> None:
        """Messages arrive."""
        for _ in range(messages):
            self.network.deliver(self.devices[sender], self.devices[receiver])

    def finish(self) -> None:
        """Everything arrives, all pipelines end."""
        self.network.deliver_all()
        for interpreter in self.interpreters:
            interpreter.close()
