"""Probes, by which a run measures the propagation delay of the paths that its plan uses.

In each step a rank sends one small message over each path, before one of its other messages over that path, in turn.
The rows of the probe's send and arrival give its delay (`planner.adapt.observation`).
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.core.step_program import StepProgram
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import probe_tag
from planner.adapt.observation import PROBE_BYTES, probe_turn
from planner.events.event import EventKind


@dataclass(eq=False)
class PathProbes:
    """Sends and receives the probes of one rank."""

    _transport: Transport
    _clock: RunClock
    _recorder: EventRecorder
    # By step and target: the number of messages of the step that are still to be sent before the probe.
    _before: dict[int, dict[str, int]] = field(default_factory=dict)
    # By target: the first step that used the path.
    _first_step: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _payload: torch.Tensor = field(default_factory=lambda: torch.zeros(PROBE_BYTES, dtype=torch.uint8))

    def post(self, current: StepProgram) -> None:
        """Post the receives of a step's probes, and choose when the rank sends its own."""
        step = current.step
        self._before = {each: left for each, left in self._before.items() if each >= step - 1}
        self._before[step] = {
            target: probe_turn(step - self._first_step.setdefault(target, step), count)
            for target, count in Counter(current.program.targets).items()
        }
        for source in dict.fromkeys(current.program.sources):
            release = self._recorder.hold(step)
            arrived = partial(self._arrived, current, source, release)
            self._transport.post(source, probe_tag(step), PROBE_BYTES, arrived)

    def precede(self, current: StepProgram, target: str) -> None:
        """Send the step's probe to a device if it is due; called before each message of the step to the device."""
        # The thread that sums gradients sends too.
        with self._lock:
            self._before[current.step][target] -= 1
            is_due = self._before[current.step][target] == -1
        if is_due:
            start_s = self._clock.now_s()
            event = partial(current.program.probe_event, EventKind.SEND, current.step, target)
            departed = self._recorder.sending(current.step, event, start_s)
            self._transport.send(target, probe_tag(current.step), self._payload, start_s, departed)

    def _arrived(self, current: StepProgram, source: str, release: Callable[[], None], handle: RecvHandle) -> None:
        # If the sender is lost, the step is not published.
        if not handle.lost:
            arrived_s = (handle.arrived_s, handle.arrived_s)
            self._recorder.log(current.program.probe_event(EventKind.RECEIVE, current.step, source, *arrived_s))
            release()
