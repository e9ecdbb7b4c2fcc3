"""Gradient all-reduce: exchanges between replicas after the actions of a step, or beside the actions in a thread."""

import threading
from dataclasses import dataclass
from functools import partial

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.core.step_program import StepProgram
from executor.runtime.path_probes import PathProbes
from executor.runtime.posted_receives import PostedStep
from executor.training.real_compute import Compute
from executor.transport.transport import Transport
from executor.transport.wire_format import sync_tag
from planner.cost.synchronisation import GradientSync
from planner.events.event import EventKind


@dataclass(eq=False)
class GradientExchange:
    """Sums gradients over the replicas of a stage, by the rounds of messages that `GradientSync.exchanges` lists."""

    _transport: Transport
    _compute: Compute
    _clock: RunClock
    _recorder: EventRecorder
    _probes: PathProbes | None

    def synchronise(self, current: StepProgram, sync: GradientSync, posted: PostedStep) -> None:
        """Replace the gradients of the layers of ``sync`` by their sum over the devices of ``sync``."""
        start_s = self._clock.now_s()
        program, step = current.program, current.step
        parts = self._compute.begin_sum(sync)
        sent_bytes = 0
        for exchange in sync.exchanges(program.device):
            if exchange.send_to is not None:
                payload = parts.part(exchange)
                self._send(current, sync, exchange.round, sync.devices[exchange.send_to], payload)
                sent_bytes += sync.messages * payload.numel()
            if exchange.receive_from is not None:
                handle = posted.exchanges.pop((sync.key, exchange.round))
                received = handle.wait()
                # The row has no duration, since the row of the whole sum includes the wait.
                arrival_s = (handle.arrived_s, handle.arrived_s)
                source, size_bytes = sync.devices[exchange.receive_from], sync.messages * handle.size_bytes
                self._recorder.log(program.exchange_event(EventKind.RECEIVE, step, source, size_bytes, *arrival_s))
                parts.put(exchange, received)
        parts.end()
        self._recorder.log(program.sync_event(step, sent_bytes, start_s, self._clock.now_s()))

    def _send(self, current: StepProgram, sync: GradientSync, number: int, target: str, payload: torch.Tensor) -> None:
        if self._probes is not None:
            self._probes.precede(current, target)
        start_s = self._clock.now_s()
        # The row stands for the whole tensor-parallel group, whose other devices log nothing.
        size_bytes = sync.messages * payload.numel()
        event = partial(current.program.exchange_event, EventKind.SEND, current.step, target, size_bytes)
        departed = self._recorder.sending(current.step, event, start_s)
        tag, flows = sync_tag(current.step, sync.key, number), sync.shards // sync.messages
        self._transport.send(target, tag, payload, start_s, departed, flows=flows)


@dataclass(eq=False)
class OverlappedAllReduce:
    """A thread that carries out the gradient sums of one step, each as soon as its gradients are complete."""

    _exchange: GradientExchange
    _clock: RunClock
    _current: StepProgram
    _posted: PostedStep

    def __post_init__(self) -> None:
        program = self._current.program
        during_actions = {each.sync for work in program.work for each in work.completes}
        self._complete = [threading.Event() for _ in program.synchronisations]
        for sync, complete in enumerate(self._complete):
            if sync not in during_actions:
                complete.set()
        self._error: Exception | None = None
        self._done_s = float("-inf")
        # A daemon thread, since after a failure of the rank it would wait for ever for gradients.
        self._thread = threading.Thread(target=self._run, name="sums", daemon=True)
        self._thread.start()

    def complete(self, sync: int) -> None:
        """Let the sum with the index ``sync`` in `DeviceProgram.synchronisations` begin: its gradients are complete."""
        self._complete[sync].set()

    def finish(self) -> float:
        """Wait for all sums; return the run second of the end of the last one, or raise `PeerLostError`."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._done_s

    def _run(self) -> None:
        try:
            for sync, complete in zip(self._current.program.synchronisations, self._complete, strict=True):
                complete.wait()
                self._exchange.synchronise(self._current, sync, self._posted)
            self._done_s = self._clock.now_s()
        except Exception as error:
            self._error = error
