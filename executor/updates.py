"""Updates that pipelines send each other without waiting: asgd, asgd-ga and ma, as `planner.update_exchange` says.

What others send is applied where a step's own update is: gradients are added to the step's own ones before these are
summed over the stage, so that all replicas apply them; parameters are averaged with the own ones before the next step.
Nothing is lost at the end: a pipeline that has done its steps waits for what the others still send, and applies it.
"""

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from executor.clock import RunClock
from executor.compute import Compute, Rows
from executor.receipt import Receipt
from executor.row_log import RowLog
from executor.tags import update_tag
from executor.transport import Transport
from planner.events import UPDATE_ACTION, Event, EventKind
from planner.plan import Plan
from planner.profile import ModelProfile
from planner.update_exchange import UpdateEdge

# Before the numbers: of how many of the receiver's steps the sender knew when it began the first step it sums.
_HEADER = struct.Struct("q")

# Rows are float32.
_ELEMENT_BYTES = 4

# Receives posted ahead on each edge.
_POSTED = 2


@dataclass(eq=False, slots=True)
class _Incoming:
    """What another pipeline sends to this device.

    Attributes:
        edge: Who and what.
        posted: Receives that are under way, in order.
        to_post: How many are still to be posted.
        arrived: How many have been taken in.
    """

    edge: UpdateEdge
    to_post: int
    posted: deque[Receipt] = field(default_factory=deque)
    arrived: int = 0


class PipelineUpdates:
    """One rank's part of the exchange.

    Args:
        plan: Says how often, and how far anybody may run ahead.
        edges: Of the whole plan.
        device: This rank's.
        steps: Of the run.
        transport: Moves bytes.
        compute: Holds gradients and parameters.
        model: Says how many numbers layers hold.
        clock: Of the run.
        log: Takes what happens.
    """

    def __init__(
        self,
        plan: Plan,
        edges: Sequence[UpdateEdge],
        device: str,
        steps: int,
        transport: Transport,
        compute: Compute,
        model: ModelProfile,
        clock: RunClock,
        log: RowLog,
    ) -> None:
        how = plan.synchronisation
        self._averages = how.method == "ma"
        self._every = how.every
        self._bound = how.staleness_bound
        self._pipelines = len(plan.pipelines)
        self._steps = steps
        self._transport = transport
        self._compute = compute
        self._model = model
        self._clock = clock
        self._log = log
        self._outgoing = [edge for edge in edges if edge.sender == device]
        self._incoming = [_Incoming(edge, steps // how.every) for edge in edges if edge.receiver == device]
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        self._foreign: defaultdict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        self._known: dict[str, int] = {}
        self._finished_steps = 0
        for incoming in self._incoming:
            self._post(incoming)

    def begin(self, step: int) -> float:
        """Wait until the step may begin, and note what the others have done so far; return when it might, run seconds.

        That is the arrival of the last update without which the device would run too far ahead.
        """
        ready_s = float("-inf")
        if self._bound is not None:
            least = max(0, (step - self._bound) // self._every)
            for incoming in self._incoming:
                while incoming.arrived < least:
                    ready_s = max(ready_s, self._take(incoming))
        if self._averages:
            self._take_arrived()
            self._average()
        if step % self._every == 0:
            self._known = {
                receiver: self._every * min(each.arrived + _settled(each.posted) for each in group)
                for receiver, group in self._by_sender().items()
            }
        return ready_s

    def add(self) -> None:
        """Add the gradients that have arrived to those of the step."""
        if self._averages:
            return
        self._take_arrived()
        for layers, received in self._foreign.items():
            for row in received:
                self._rows(layers).add_gradients(row)

    def accumulate(self) -> None:
        """Add the step's own gradients, summed over the stage, to those that will be sent."""
        if self._averages:
            return
        for layers in {edge.layers for edge in self._outgoing}:
            own = self._rows(layers).gradients()
            self._sums[layers] = self._sums[layers] + own if layers in self._sums else own
        # What others sent goes no further: they have applied it themselves.
        for layers, received in self._foreign.items():
            for row in received:
                self._take_out(layers, row)
        self._foreign.clear()

    def finish(self, step: int, now_s: float) -> None:
        """Send, if the step is one after which that is due; it has been applied here."""
        self._finished_steps = step + 1
        if (step + 1) % self._every:
            return
        for edge in self._outgoing:
            row = self._rows(edge.layers).parameters() if self._averages else self._sums[edge.layers]
            self._send(edge, step, row, now_s)
        self._sums.clear()

    def drain(self) -> None:
        """After the last step: wait for everything that is still to come, and apply it."""
        for incoming in self._incoming:
            while incoming.posted:
                self._take(incoming)
        if self._averages:
            self._average()
        elif self._foreign:
            self._compute.clear_gradients()
            for layers, received in self._foreign.items():
                for row in received:
                    self._rows(layers).add_gradients(row)
            self._compute.finish_step(self._steps, None)

    def _take_out(self, layers: tuple[int, int], row: torch.Tensor) -> None:
        for (first, end), total in self._sums.items():
            low, high = max(first, layers[0]), min(end, layers[1])
            if low < high:
                start, count = self._elements(first, low), self._elements(low, high)
                foreign = self._elements(layers[0], low)
                total[start : start + count] -= row[foreign : foreign + count]

    def _rows(self, layers: tuple[int, int]) -> Rows:
        return self._compute.rows(*layers, self._elements(*layers))

    def _elements(self, first_layer: int, end_layer: int) -> int:
        return self._model.parameter_bytes(first_layer, end_layer) // _ELEMENT_BYTES

    def _average(self) -> None:
        for layers, received in self._foreign.items():
            own = self._rows(layers).parameters()
            moved = own + sum((row - own for row in received), torch.zeros_like(own)) / self._pipelines
            self._rows(layers).put_parameters(moved)
        self._foreign.clear()

    def _take_arrived(self) -> None:
        for incoming in self._incoming:
            while incoming.posted and incoming.posted[0].settled:
                self._take(incoming)

    def _take(self, incoming: _Incoming) -> float:
        """Take in the next update of an edge, waiting for it if need be; return when it arrived, run seconds."""
        receipt = incoming.posted.popleft()
        payload = receipt.wait()
        edge = incoming.edge
        (known,) = _HEADER.unpack(payload[: _HEADER.size].numpy().tobytes())
        self._foreign[edge.layers].append(payload[_HEADER.size :].clone().view(torch.float32))
        step = (incoming.arrived + 1) * self._every - 1
        incoming.arrived += 1
        self._log.log(_update_row(edge, step, receipt.arrived_s, self._clock.now_s(), self._finished_steps - known))
        self._post(incoming)
        return receipt.arrived_s

    def _post(self, incoming: _Incoming) -> None:
        while incoming.to_post and len(incoming.posted) < _POSTED:
            exchange = self._steps // self._every - incoming.to_post
            edge = incoming.edge
            tag = update_tag(exchange, edge.layers[0])
            incoming.posted.append(self._transport.post(edge.sender, tag, _HEADER.size + edge.size_bytes))
            incoming.to_post -= 1

    def _send(self, edge: UpdateEdge, step: int, row: torch.Tensor, now_s: float) -> None:
        header = torch.frombuffer(bytearray(_HEADER.pack(self._known.get(edge.receiver, 0))), dtype=torch.uint8)
        payload = torch.cat([header, row.view(torch.uint8)])
        assert payload.numel() == _HEADER.size + edge.size_bytes, (edge, payload.numel())
        departed = self._log.sending(step, _send_row(edge, step), now_s)
        tag = update_tag((step + 1) // self._every - 1, edge.layers[0])
        self._transport.send(edge.receiver, tag, payload, now_s, departed)

    def _by_sender(self) -> dict[str, list[_Incoming]]:
        groups: defaultdict[str, list[_Incoming]] = defaultdict(list)
        for incoming in self._incoming:
            groups[incoming.edge.sender].append(incoming)
        return groups


def _settled(posted: Sequence[Receipt]) -> int:
    """Return how many of the first receives are there."""
    count = 0
    for receipt in posted:
        if not receipt.settled:
            break
        count += 1
    return count


def _send_row(edge: UpdateEdge, step: int) -> Callable[[float, float], Event]:
    place = (edge.sender, edge.receiver, edge.pipelines[0], -1, -1, step)
    return lambda start_s, end_s: Event(EventKind.SEND, *place, UPDATE_ACTION, start_s, end_s, edge.size_bytes)


def _update_row(edge: UpdateEdge, step: int, arrived_s: float, now_s: float, staleness: int) -> Event:
    place = (edge.receiver, edge.sender, edge.pipelines[1], edge.stage, -1, step)
    return Event(EventKind.UPDATE, *place, "", arrived_s, now_s, edge.size_bytes, staleness)
