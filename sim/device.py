"""A device at work: its programs step after step, waiting for what has not arrived."""

from collections.abc import Generator, Hashable

import simpy

from planner.events import SYNC_ACTION, Event, EventKind
from planner.program import DeviceProgram, GradientSync, Transfer
from planner.ring import ring_exchanges
from sim.world import World


class SimulatedDevice:
    """Carries out its programs in simulated time and logs what happens."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._environment = world.environment
        self._name = name

    def run(self, steps: int) -> Generator[simpy.Event, None, None]:
        """Work through the steps; the process ends when the last one is done."""
        for step in range(steps):
            yield self._world.plan_known(step)
            program = self._world.program(step, self._name)
            for work in program.work:
                for transfer in work.receives:
                    yield from self._receive(step, program, transfer)
                start_s = self._environment.now
                yield self._environment.timeout(work.duration_s)
                action = work.action
                self._log(
                    EventKind.COMPUTE,
                    program,
                    step,
                    start_s,
                    action=str(action.kind),
                    microbatch=action.microbatch,
                )
                for transfer in work.sends:
                    self._send(step, program, transfer)
            for sync in program.synchronisations:
                yield from self._synchronise(step, program, sync)
            self._world.finish(step)

    def _receive(self, step: int, program: DeviceProgram, transfer: Transfer) -> Generator[simpy.Event, None, None]:
        start_s = self._environment.now
        yield from self._wait_for((step, transfer))
        if self._environment.now > start_s:
            self._log(
                EventKind.RECEIVE,
                program,
                step,
                start_s,
                peer=transfer.source,
                action=str(transfer.kind),
                microbatch=transfer.microbatch,
                size_bytes=transfer.size_bytes,
            )

    def _wait_for(self, key: Hashable) -> Generator[simpy.Event, None, None]:
        arrival = self._world.arrival(key)
        if not arrival.processed:
            yield arrival
        self._world.forget(key)

    def _send(self, step: int, program: DeviceProgram, transfer: Transfer) -> None:
        self._transmit(
            step,
            program,
            (step, transfer),
            transfer.target,
            transfer.size_bytes,
            str(transfer.kind),
            transfer.microbatch,
        )

    def _transmit(
        self,
        step: int,
        program: DeviceProgram,
        key: Hashable,
        target: str,
        size_bytes: int,
        action: str,
        microbatch: int,
    ) -> None:
        start_s = self._environment.now
        delivery = self._world.channel(self._name, target).send(size_bytes)
        self._world.expect_send(step)

        def left(_: simpy.Event) -> None:
            self._log(
                EventKind.SEND,
                program,
                step,
                start_s,
                peer=target,
                action=action,
                microbatch=microbatch,
                size_bytes=size_bytes,
            )
            self._world.finish(step)

        def arrived(_: simpy.Event) -> None:
            self._world.arrival(key).succeed()

        delivery.left.callbacks.append(left)
        delivery.arrived.callbacks.append(arrived)

    def _synchronise(self, step: int, program: DeviceProgram, sync: GradientSync) -> Generator[simpy.Event, None, None]:
        """Sum gradients over the ring, exchange by exchange."""
        start_s = self._environment.now
        count = len(sync.devices)
        position = sync.devices.index(self._name)
        following, previous = sync.devices[(position + 1) % count], sync.devices[position - 1]
        sent_bytes = 0
        for turn, exchange in enumerate(ring_exchanges(sync.elements, count, position)):
            first, end = exchange.send
            size_bytes = (end - first) * self._world.element_bytes
            key = (step, sync.first_layer, turn, self._name)
            self._transmit(step, program, key, following, size_bytes, SYNC_ACTION, -1)
            sent_bytes += size_bytes
            yield from self._wait_for((step, sync.first_layer, turn, previous))
        self._log(EventKind.SYNC, program, step, start_s, action=SYNC_ACTION, size_bytes=sent_bytes)

    def _log(
        self,
        kind: EventKind,
        program: DeviceProgram,
        step: int,
        start_s: float,
        *,
        action: str,
        peer: str = "",
        microbatch: int = -1,
        size_bytes: int = 0,
    ) -> None:
        self._world.log(
            Event(
                kind,
                self._name,
                peer,
                program.pipeline,
                program.stage,
                microbatch,
                step,
                action,
                start_s,
                self._environment.now,
                size_bytes,
            )
        )
