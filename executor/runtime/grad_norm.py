"""The norm of all gradients, computed along the pipeline without a barrier.

Each device adds its part to a sum, which travels with the gradients from the last stage up to the first. Later stages
finish their backward passes earlier, so the sum is complete when the first stage has finished. The total then travels
down to the last stage, ahead of the next step's first activations; each device updates its layers just before their
next use.
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
    """One rank's place in the chain of its pipeline's devices.

    Its messages of eight bytes each are not logged, since plans do not include them.
    """

    def __init__(self, transport: Transport, wanted: bool) -> None:
        self._transport = transport
        self.wanted = wanted
        self._from_below: dict[int, RecvHandle] = {}
        self._from_above: dict[int, RecvHandle] = {}
        self._sums: dict[int, float] = {}

    def post(self, current: StepProgram) -> None:
        """Post the receives of a step."""
        if not self.wanted:
            return
        place, tag = _Place(current), norm_tag(current.step)
        if place.below is not None:
            self._from_below[current.step] = self._transport.post(place.below, tag, _NUMBER.size)
        if place.above is not None:
            self._from_above[current.step] = self._transport.post(place.above, tag, _NUMBER.size)

    def contribute(self, current: StepProgram, squared_norm: Callable[[], float]) -> None:
        """Add this rank's part to the sum, and send it up."""
        if not self.wanted:
            return
        place, step = _Place(current), current.step
        # Called on every rank: the devices of a tensor-parallel group compute the norm together.
        total = squared_norm()
        if not place.leads:
            return
        if place.below is not None:
            total += _number(self._from_below.pop(step))
        if place.above is not None:
            self._send(place.above, step, total)
        self._sums[step] = total

    def total(self, current: StepProgram) -> float | None:
        """Return the squared norm of all gradients of a step, and pass it on; None if it is not needed."""
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
    """A rank's neighbours in the chain; the first device of each stage leads the stage's others.

    Attributes:
        leads: Whether this rank adds its part to the sum and passes the sum on.
        above: The device that sends this rank the total; None on the first stage's leader.
        below: The device that sends this rank a partial sum; None without one.
        informs: The devices that this rank sends the total to.
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
