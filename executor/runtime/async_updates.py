"""Updates that pipelines send each other without waiting: asgd, asgd-ga and ma, as `planner.cost.synchronisation` says.

Gradients that arrive are added to those of the receiver's step before these are summed over the stage, so that all
replicas apply them, in the update of that step. With plain SGD without clipping every pipeline's parameters move by
the same gradients in the end, each at another time. Parameters that arrive are averaged with the own ones before the
next step: every pipeline that has sent some since the last average counts as much as the receiver does, with its
newest ones.

Under a staleness bound of 0 a step applies the updates of the steps before it and no others, so that training does not
depend on when messages arrive. At the end nothing that was sent is lost: a pipeline that has done its steps waits for
what the others still send, and makes one more update of it. But nothing more is sent: where the number of steps is no
multiple of ``every``, the others never hear of the steps after the last exchange, neither of their gradients nor, with
ma, of their parameters.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.runtime.posted_receives import HEADER, IncomingUpdates, Update
from executor.training.compute import Compute, Rows
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import update_tag
from planner.cost.synchronisation import UpdateEdge
from planner.events.event import UPDATE_ACTION, Event, EventKind
from planner.plan.plan import Plan, Stage
from planner.scenario.profile import ModelProfile

# Rows are float32.
_ELEMENT_BYTES = 4


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
        log: EventRecorder,
    ) -> None:
        how = plan.synchronisation
        self._averages = how.method == "ma"
        self._every = how.interval_steps
        self._bound = how.staleness_bound
        self._pipelines = len(plan.pipelines)
        self._stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages if _holds(stage, device)]
        self._device = device
        self._exchanges = steps // how.interval_steps
        self._last = steps - 1
        self._show_last: Callable[[], None] = _nothing_is_held
        self._transport = transport
        self._compute = compute
        self._model = model
        self._clock = clock
        self._log = log
        self._outgoing = [edge for edge in edges if edge.sender == device]
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        self._added: list[Update] = []
        self._known: dict[str, int] = {}
        self._ended_s: list[float] = []
        self._incoming = [
            IncomingUpdates(edge, self._exchanges, self._posting(edge)) for edge in edges if edge.receiver == device
        ]

    def begin(self, step: int) -> float:
        """Wait until the step may begin, and note what the others have done so far; return when it might, run seconds.

        That is the arrival of the last update without which the device would run too far ahead.
        """
        if step == self._last:
            self._show_last = self._log.hold(step)
        ready_s = float("-inf")
        if self._bound is not None:
            needed = max(0, (step - self._bound) // self._every)
            ready_s = max((each.wait_for(needed) for each in self._incoming), default=ready_s)
        if self._averages:
            self._average(self._take(self._end(step)))
        if step % self._every == 0:
            self._known = {
                sender: self._every * min(each.arrived for each in group) for sender, group in self._by_sender().items()
            }
        return ready_s

    def add(self, step: int) -> None:
        """Add the gradients that have arrived to those of the step."""
        if not self._averages:
            self._added = self._take(self._end(step))
            for update in self._added:
                self._rows(update.edge.layers).add_gradients(update.row)

    def accumulate(self) -> None:
        """Add the step's own gradients, summed over the stage, to those that will be sent."""
        if self._averages:
            return
        for layers in {edge.layers for edge in self._outgoing}:
            own = self._rows(layers).gradients()
            # What others sent goes no further: they have applied it themselves.
            for update in self._added:
                self._take_out(update, own, layers)
            self._sums[layers] = self._sums[layers] + own if layers in self._sums else own

    def finish(self, step: int, now_s: float) -> None:
        """Send, if the step is one after which that is due; it has been applied here."""
        self._ended_s.append(now_s)
        self._log_applied(self._added, now_s)
        self._added = []
        if (step + 1) % self._every:
            return
        for edge in self._outgoing:
            row = self._rows(edge.layers).parameters() if self._averages else self._sums[edge.layers]
            self._send(edge, step, row, now_s)
        self._sums.clear()

    def drain(self) -> bool:
        """After the last step, wait for everything that is still to come; return whether it asks for an update.

        If so, all of it is in the gradients, on every replica. Parameters have been averaged.
        """
        applies = self._apply_rest()
        self._show_last()
        return applies

    def _apply_rest(self) -> bool:
        for incoming in self._incoming:
            incoming.wait_for_all()
        rest = self._take(None)
        if self._averages:
            self._average(rest)
            return False
        self._compute.clear_gradients()
        for update in rest:
            self._rows(update.edge.layers).add_gradients(update.row)
        sums = [self._shared(stage) for stage in self._stages]
        # All replicas of a stage start from nothing and add the same row, also where that leaves no gradient.
        self._compute.clear_gradients()
        for stage, row in zip(self._stages, sums, strict=True):
            self._rows((stage.first_layer, stage.end_layer)).add_gradients(row)
        self._log_applied(rest, self._clock.now_s())
        return True

    def _posting(self, edge: UpdateEdge) -> Callable[[int, Callable[[RecvHandle], None]], RecvHandle]:
        size_bytes = HEADER.size + edge.size_bytes

        def post(exchange: int, arrived: Callable[[RecvHandle], None]) -> RecvHandle:
            return self._transport.post(edge.sender, update_tag(exchange, edge.layers[0]), size_bytes, arrived)

        return post

    def _end(self, step: int) -> int | None:
        """Which round a step no longer applies, though it may have arrived already."""
        return step // self._every if self._bound == 0 else None

    def _take(self, end: int | None) -> list[Update]:
        return [update for incoming in self._incoming for update in incoming.take(end)]

    def _take_out(self, update: Update, own: torch.Tensor, layers: tuple[int, int]) -> None:
        """Subtract an update where it overlaps with a row of some layers."""
        low, high = max(update.edge.layers[0], layers[0]), min(update.edge.layers[1], layers[1])
        if low < high:
            count = self._elements(low, high)
            there, here = self._elements(update.edge.layers[0], low), self._elements(layers[0], low)
            own[here : here + count] -= update.row[there : there + count]

    def _average(self, updates: Sequence[Update]) -> None:
        # The newest of each sender: it knows more than those before it.
        newest = {update.edge: update for update in updates}
        moves = [
            (edge.layers, (update.row - self._rows(edge.layers).parameters()) / self._pipelines)
            for edge, update in newest.items()
        ]
        for layers, move in moves:
            rows = self._rows(layers)
            rows.put_parameters(rows.parameters() + move)
        self._log_applied(updates, self._clock.now_s())

    def _shared(self, stage: Stage) -> torch.Tensor:
        """Return the first replica's gradients, on every replica. They are no part of a step, and not logged."""
        leader, *others = (replica.device for replica in stage.replicas)
        layers = (stage.first_layer, stage.end_layer)
        elements = self._elements(*layers)
        tag = update_tag(self._exchanges, layers[0])
        if self._device != leader and elements:
            return self._transport.post(leader, tag, elements * _ELEMENT_BYTES).wait().view(torch.float32)
        row = self._rows(layers).gradients()
        for other in others if elements else ():
            self._transport.send(other, tag, row.view(torch.uint8), self._clock.now_s())
        return row

    def _rows(self, layers: tuple[int, int]) -> Rows:
        return self._compute.rows(*layers, self._elements(*layers))

    def _elements(self, first_layer: int, end_layer: int) -> int:
        return self._model.parameter_bytes(first_layer, end_layer) // _ELEMENT_BYTES

    def _send(self, edge: UpdateEdge, step: int, row: torch.Tensor, now_s: float) -> None:
        header = torch.frombuffer(bytearray(HEADER.pack(self._known.get(edge.receiver, 0))), dtype=torch.uint8)
        payload = torch.cat([header, row.view(torch.uint8)])
        assert payload.numel() == HEADER.size + edge.size_bytes, (edge, payload.numel())
        departed = self._log.sending(self._last, _send_row(edge, step), now_s)
        tag = update_tag((step + 1) // self._every - 1, edge.layers[0])
        self._transport.send(edge.receiver, tag, payload, now_s, departed)

    def _log_applied(self, updates: Sequence[Update], now_s: float) -> None:
        for update in updates:
            finished = bisect_right(self._ended_s, update.arrived_s)
            step = (update.exchange + 1) * self._every - 1
            applied_s = max(now_s, update.arrived_s)
            self._log.log(_update_row(update.edge, step, update.arrived_s, applied_s, finished - update.known))

    def _by_sender(self) -> dict[str, list[IncomingUpdates]]:
        groups: defaultdict[str, list[IncomingUpdates]] = defaultdict(list)
        for incoming in self._incoming:
            groups[incoming.edge.sender].append(incoming)
        return groups


def _nothing_is_held() -> None:
    """The last step has not begun."""


def _holds(stage: Stage, device: str) -> bool:
    return any(replica.device == device for replica in stage.replicas)


def _send_row(edge: UpdateEdge, step: int) -> Callable[[float, float], Event]:
    place = (edge.sender, edge.receiver, edge.pipelines[0], -1, -1, step)
    return lambda start_s, end_s: Event(EventKind.SEND, *place, UPDATE_ACTION, start_s, end_s, edge.size_bytes)


def _update_row(edge: UpdateEdge, step: int, arrived_s: float, applied_s: float, staleness: int) -> Event:
    place = (edge.receiver, edge.sender, edge.pipelines[1], edge.stage, -1, step)
    return Event(EventKind.UPDATE, *place, "", arrived_s, applied_s, edge.size_bytes, staleness)
