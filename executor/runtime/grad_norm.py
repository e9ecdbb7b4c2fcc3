"""The norm of all gradients, known to every stage before it needs it and without anybody waiting for it.

Each device adds its part to a sum that follows the gradients up the pipeline: later stages finish earlier, so the
sum is there when the first stage has finished its own part, and is then complete. From there it goes down ahead of
the next step's first activations, and every device updates its layers just before it needs them.
"""

import struct
from collections.abc import Callable

import torch

from executor.core.step_program import StepProgram
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import norm_tag

_SIZE_BYTES = 8


class NormChain:
    """One rank's place in the chain of its pipeline's devices.

    The messages, eight bytes each, are not logged: they are no part of what a plan moves.

    Args:
        transport: Moves bytes.
        wanted: Whether anybody wants the norm.
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
            self._from_below[current.step] = self._transport.post(place.below, tag, _SIZE_BYTES)
        if place.above is not None:
            self._from_above[current.step] = self._transport.post(place.above, tag, _SIZE_BYTES)

    def contribute(self, current: StepProgram, squared_norm: Callable[[], float]) -> None:
        """Add this rank's part to the sum, and send it up."""
        if not self.wanted:
            return
        place, step = _Place(current), current.step
        # Asked of everyone: the devices of a tensor-parallel group make it together.
        total = squared_norm()
        if not place.leads:
            return
        if place.below is not None:
            total += _number(self._from_below.pop(step).wait())
        if place.above is not None:
            self._send(place.above, step, total)
        self._sums[step] = total

    def total(self, current: StepProgram) -> float | None:
        """Return the squared norm of all gradients of a step, and pass it on; None if nobody wants it."""
        if not self.wanted:
            return None
        place, step = _Place(current), current.step
        own = self._sums.pop(step, 0.0)
        total = own if place.above is None else _number(self._from_above.pop(step).wait())
        for device in place.informs:
            self._send(device, step, total)
        return total

    def _send(self, target: str, step: int, number: float) -> None:
        payload = torch.frombuffer(bytearray(struct.pack("d", number)), dtype=torch.uint8)
        self._transport.send(target, norm_tag(step), payload, 0.0)


class _Place:
    """Who is above and below a rank in the chain; the first replica of a device group leads the others.

    Attributes:
        leads: Whether it is the one that adds and passes on.
        above: Whom it hears the total from; None for the one at the top.
        below: Whom it hears a part of the sum from.
        informs: Whom it tells the total.
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


def _number(payload: torch.Tensor) -> float:
    number: float = struct.unpack("d", payload.numpy().tobytes())[0]
    return number
