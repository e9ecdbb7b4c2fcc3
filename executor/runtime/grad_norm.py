"""Computes the norm of all gradients, for gradient clipping, along the pipeline and without a barrier.

After its last backward each device adds the squared norm of its gradients to a partial sum, from the last stage to the
first. The first stage, which ends last, completes the sum. The total is then sent from the first stage to the last,
before the next step's activations. Each device updates its parameters when the total arrives, just before their next
use.
"""

import struct
from collections.abc import Callable

import torch

from executor.core.step_program import StepProgram
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import norm_tag

_NUMBER = struct.Struct("d")


class NormChain:
    """Computes the norm on one rank, together with the other ranks of the pipeline.

    Messages of eight bytes each are sent along the stages; they are not logged, since plans do not include them.

    Attributes:
        wanted: Whether gradients are clipped; otherwise all methods do nothing.
    """

    def __init__(self, transport: Transport, wanted: bool) -> None:
        self._transport = transport
        self.wanted = wanted
        self._from_below: dict[int, RecvHandle] = {}
        self._from_above: dict[int, RecvHandle] = {}
        self._sums: dict[int, float] = {}

    def post(self, current: StepProgram) -> None:
        """Post the receives of a step's partial and total sum."""
        if not self.wanted:
            return
        place, tag = _Place(current), norm_tag(current.step)
        if place.below is not None:
            self._from_below[current.step] = self._transport.post(place.below, tag, _NUMBER.size)
        if place.above is not None:
            self._from_above[current.step] = self._transport.post(place.above, tag, _NUMBER.size)

    def contribute(self, current: StepProgram, squared_norm: Callable[[], float]) -> None:
        """Add this rank's squared norm to the partial sum, and send the result to the previous stage."""
        if not self.wanted:
            return
        place, step = _Place(current), current.step
        # On every rank, since the devices of a tensor-parallel group compute their norm together.
        total = squared_norm()
        if not place.leads:
            return
        if place.below is not None:
            total += _number(self._from_below.pop(step))
        if place.above is not None:
            self._send(place.above, step, total)
        self._sums[step] = total

    def total(self, current: StepProgram) -> float | None:
        """Return the squared norm of all gradients of a step, and send it on; None if gradients are not clipped."""
        if not self.wanted:
            return None
        place, step = _Place(current), current.step
        own = self._sums.pop(step, 0.0)
        total = own if place.above is None else _number(self._from_above.pop(step))
        for device in place.informs:
            self._send(device, step, total)
        return total

    def _send(self, target: str, step: int, number: float) -> None:
        payload = torch.frombuffer(bytearray(_NUMBER.pack(number)), dtype=torch.uint8)
        self._transport.send(target, norm_tag(step), payload, 0.0)


class _Place:
    """The devices with which a rank exchanges sums: the first device of each stage, its leader, does so for the stage.

    Attributes:
        leads: Whether this rank is the leader of its stage.
        above: The device that sends this rank the total; None on the leader of the first stage.
        below: The device that sends this rank a partial sum; None on the last stage, and on ranks that do not lead.
        informs: The devices to which this rank sends the total.
    """

    def __init__(self, current: StepProgram) -> None:
        pipeline = current.plan.pipelines[current.program.pipeline]
        groups = [tuple(device for r in stage.replicas for device in r.devices) for stage in pipeline.stages]
        chain = list(dict.fromkeys(groups))
        own = next(index for index, group in enumerate(chain) if current.program.device in group)
        leader = chain[own][0]
        self.leads = current.program.device == leader
        self.above = (chain[own - 1][0] if own else None) if self.leads else leader
        self.below = chain[own + 1][0] if self.leads and own + 1 < len(chain) else None
        others = chain[own][1:] if self.leads else ()
        self.informs = [*([self.below] if self.below is not None else []), *others]


def _number(handle: RecvHandle) -> float:
    number: float = _NUMBER.unpack(handle.wait().numpy().tobytes())[0]
    return number
