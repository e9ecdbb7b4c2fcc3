"""A device at work: its programs step after step, waiting for what has not arrived."""

from collections.abc import Callable, Generator, Hashable
from functools import partial

import simpy

from planner.events import Event, EventKind
from planner.program import DeviceProgram, GradientSync, Transfer
from planner.ring import ring_exchanges
from sim.world import World

Waiting = Generator[simpy.Event, None, None]


class SimulatedDevice:
    """Carries out its programs in simulated time and logs what happens."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._environment = world.environment
        self._name = name

    def run(self, steps: int) -> Waiting:
        """Work through the steps; the process ends when the last one is done."""
        for step in range(steps):
            yield self._world.plan_known(step)
            program = self._world.program(step, self._name)
            for work in program.work:
                for transfer in work.receives:
                    yield from self._receive(step, program, transfer)
                start_s = self._environment.now
                yield self._environment.timeout(work.duration_s)
                self._world.log(program.compute_event(step, work.action, start_s, self._environment.now))
                for transfer in work.sends:
                    self._send(step, program, transfer)
            for sync in program.synchronisations:
                yield from self._synchronise(step, program, sync)
            self._world.finish(step)

    def _receive(self, step: int, program: DeviceProgram, transfer: Transfer) -> Waiting:
        start_s = self._environment.now
        yield from self._wait_for((step, transfer))
        now_s = self._environment.now
        if now_s > start_s:
            self._world.log(program.transfer_event(EventKind.RECEIVE, step, transfer, start_s, now_s))

    def _wait_for(self, key: Hashable) -> Waiting:
        arrival = self._world.arrival(key)
        if not arrival.processed:
            yield arrival
        self._world.forget(key)

    def _send(self, step: int, program: DeviceProgram, transfer: Transfer) -> None:
        row = partial(program.transfer_event, EventKind.SEND, step, transfer)
        self._transmit(step, (step, transfer), transfer.target, transfer.size_bytes, row)

    def _transmit(
        self, step: int, key: Hashable, target: str, size_bytes: int, row: Callable[[float, float], Event]
    ) -> None:
        """Hand bytes over; when the last one has departed, log the row made from start and end."""
        start_s = self._environment.now
        delivery = self._world.channel(self._name, target).send(size_bytes)
        self._world.expect_send(step)

        def departed(_: simpy.Event) -> None:
            self._world.log(row(start_s, self._environment.now))
            self._world.finish(step)

        def arrived(_: simpy.Event) -> None:
            self._world.arrival(key).succeed()

        delivery.departed.callbacks.append(departed)
        delivery.arrived.callbacks.append(arrived)

    def _synchronise(self, step: int, program: DeviceProgram, sync: GradientSync) -> Waiting:
        """Sum gradients over the ring, exchange by exchange."""
        start_s = self._environment.now
        previous, following = sync.neighbours(self._name)
        sent_bytes = 0
        for turn, exchange in enumerate(ring_exchanges(sync.elements, len(sync.devices), sync.position(self._name))):
            size_bytes = exchange.send_elements * self._world.element_bytes
            row = partial(program.exchange_event, step, following, size_bytes)
            self._transmit(step, (step, sync.first_layer, turn, self._name), following, size_bytes, row)
            sent_bytes += size_bytes
            yield from self._wait_for((step, sync.first_layer, turn, previous))
        self._world.log(program.sync_event(step, sent_bytes, start_s, self._environment.now))
