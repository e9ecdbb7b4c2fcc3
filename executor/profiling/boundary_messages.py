"""What a stage does at its boundaries while its layers are measured: it pauses, or exchanges messages as in training.

Messages cost more than the time on the network. The sending thread and gloo's threads copy bytes on cores that compute,
and the ranks' layers take longer for it. Measured on two cores with two ranks: 0.3 to 0.4 ms for each action.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from executor.core.step_program import DeviceProgram, Transfer, Work
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import transfer_tag
from planner.plan.actions import Kind

# Number of passes by which a stage may be ahead of the gradients that the next stage returns. The stages compute at the
# same time only if it is above 0; tags of messages would repeat at 3.
_AHEAD = 2


class Boundary(Protocol):
    """Called before and after each pass through a stage while its layers are measured."""

    def passes(self, least: int, least_s: float, last_s: float) -> int:
        """Begin a series of passes; return their number: ``least`` or more, which take about ``least_s`` or longer.

        ``last_s`` is how long a pass has taken, seconds.
        """

    def receive(self, kind: Kind) -> None:
        """Wait for what a pass needs; ``kind`` is `Kind.FORWARD` or `Kind.BACKWARD`."""

    def send(self, kind: Kind) -> None:
        """Hand over what a pass has computed."""

    def finish(self) -> None:
        """Wait until all messages have arrived."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses before each pass, in place of waiting for a message: after a pause a core is slower for milliseconds."""

    wait_s: float = 0.001

    def passes(self, least: int, least_s: float, last_s: float) -> int:
        """Return the number of passes."""
        return max(least, int(least_s / last_s))

    def receive(self, kind: Kind) -> None:
        """Pause."""
        time.sleep(self.wait_s)

    def send(self, kind: Kind) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


class BoundaryMessages:
    """Exchanges the messages of a microbatch with the neighbouring stages, whose ranks measure at the same time.

    Args:
        transport: The connections to the other ranks.
        program: This rank's program in the plan, which has one stage of the pipeline.
    """

    def __init__(self, transport: Transport, program: DeviceProgram) -> None:
        self._transport = transport
        first = [work for work in program.work if work.action.microbatch == 0]
        self._forward = next(work for work in first if work.action.kind is Kind.FORWARD)
        self._backward = next(work for work in first if work.action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT))
        self._payloads = {
            each: torch.zeros(each.size_bytes, dtype=torch.uint8)
            for work in (self._forward, self._backward)
            for each in work.sends
        }
        self._posted: dict[Kind, deque[list[RecvHandle]]] = {Kind.FORWARD: deque(), Kind.BACKWARD: deque()}

    def passes(self, least: int, least_s: float, last_s: float) -> int:
        """Begin a series of passes; return their number, the same on all ranks; all of them must call this method."""
        slowest = torch.tensor([last_s], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self._passes = max(least, int(least_s / slowest.item()))
        self._sent = {Kind.FORWARD: 0, Kind.BACKWARD: 0}
        self._post(0)
        return self._passes

    def receive(self, kind: Kind) -> None:
        """Wait for the inputs of a forward, or for the gradients of an earlier microbatch than the present one."""
        if kind is Kind.FORWARD or self._sent[kind] >= _AHEAD:
            self._take(kind)

    def send(self, kind: Kind) -> None:
        """Send the outputs of a forward, or the gradients of a backward."""
        number = self._sent[kind]
        for transfer in self._work(kind).sends:
            self._transport.send(transfer.target, transfer_tag(number, transfer), self._payloads[transfer], 0.0)
        self._sent[kind] += 1
        if kind is Kind.BACKWARD:
            self._post(number + 1)

    def finish(self) -> None:
        """Wait for the gradients that the next stage has still to send."""
        while self._posted[Kind.BACKWARD]:
            self._take(Kind.BACKWARD)

    def _post(self, number: int) -> None:
        if number == self._passes:
            return
        for kind, handles in self._posted.items():
            handles.append([self._receive(number, each) for each in self._work(kind).receives])

    def _receive(self, number: int, transfer: Transfer) -> RecvHandle:
        return self._transport.post(transfer.source, transfer_tag(number, transfer), transfer.size_bytes)

    def _take(self, kind: Kind) -> None:
        for handle in self._posted[kind].popleft():
            handle.wait()

    def _work(self, kind: Kind) -> Work:
        return self._forward if kind is Kind.FORWARD else self._backward


def has_one_stage(program: DeviceProgram) -> bool:
    """Return whether all actions of a rank belong to one stage, as `BoundaryMessages` needs."""
    return len({work.action.stage for work in program.work}) == 1
