"""Updates that pipelines send each other without waiting: asgd, asgd-ga and ma (see `planner.cost.synchronisation`).

Gradients that arrive are added to those of the receiver's step before these are summed over the stage, so that all
replicas apply them, in the update of that step. With plain SGD without clipping every pipeline's parameters change by
the same gradients in the end, each at another time. Parameters that arrive are averaged with the own ones before the
next step: every pipeline that has sent some since the last average counts as much as the receiver, with its newest
parameters.

With a staleness bound of 0 a step applies exactly the updates of the steps before it, so that training does not depend
on arrival times. At the end nothing that was sent is lost: a pipeline that has finished its steps waits for the updates
still to come, and makes one more update from them. Nothing more is sent, however: if the number of steps is no multiple
of ``interval_steps``, the others never get what follows the last exchange, neither gradients nor, with ma, parameters.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.runtime.posted_receives import HEADER, IncomingUpdates, Update
from executor.training.compute import LayerParameters
from executor.training.real_compute import Compute
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import update_tag
from planner.cost.synchronisation import UpdateEdge
from planner.events.event import UPDATE_ACTION, Event, EventKind
from planner.plan.plan import Plan, Stage
from planner.scenario.profile import ModelProfile

# Gradients and parameters are float32.
_ELEMENT_BYTES = 4


class PipelineUpdates:
    """One rank's part of the exchange between pipelines."""

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
        recorder: EventRecorder,
    ) -> None:
        settings = plan.synchronisation
        self._averages = settings.method == "ma"
        self._interval_steps = settings.interval_steps
        self._staleness_bound = settings.staleness_bound
        self._pipelines = len(plan.pipelines)
        self._stages = [
            stage
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            if any(replica.device == device for replica in stage.replicas)
        ]
        self._device = device
        self._exchanges = steps // settings.interval_steps
        self._last = steps - 1
        self._publish_last: Callable[[], None] = lambda: None
        self._transport = transport
        self._compute = compute
        self._model = model
        self._clock = clock
        self._recorder = recorder
        self._outgoing = [edge for edge in edges if edge.sender == device]
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        self._added: list[Update] = []
        self._known: dict[str, int] = {}
        self._ended_s: list[float] = []
        self._incoming = [
            IncomingUpdates(edge, self._exchanges, partial(self._post, edge))
            for edge in edges
            if edge.receiver == device
        ]

    def begin(self, step: int) -> float:
        """Wait until the staleness bound lets the step begin, and average parameters that have arrived.

        Returns:
            When the last update arrived that the step had to wait for, run seconds; minus infinity if there is none.
        """
        if step == self._last:
            self._publish_last = self._recorder.hold(step)
        ready_s = float("-inf")
        if self._staleness_bound is not None:
            needed = max(0, (step - self._staleness_bound) // self._interval_steps)
            ready_s = max((each.wait_for(needed) for each in self._incoming), default=ready_s)
        if self._averages:
            self._average(self._take(self._stop(step)))
        if step % self._interval_steps == 0:
            arrived: defaultdict[str, list[int]] = defaultdict(list)
            for incoming in self._incoming:
                arrived[incoming.edge.sender].append(incoming.arrived)
            self._known = {sender: self._interval_steps * min(counts) for sender, counts in arrived.items()}
        return ready_s

    def add(self, step: int) -> None:
        """Add the gradients that have arrived to those of the step."""
        if not self._averages:
            self._added = self._take(self._stop(step))
            for update in self._added:
                self._parameters(update.edge.layers).add_gradients(update.values)

    def accumulate(self) -> None:
        """Add the step's own gradients, summed over the stage, to those that will be sent."""
        if self._averages:
            return
        for layers in {edge.layers for edge in self._outgoing}:
            own = self._parameters(layers).gradients()
            # Other pipelines have applied their own gradients themselves.
            for update in self._added:
                self._subtract(update, own, layers)
            self._sums[layers] = self._sums[layers] + own if layers in self._sums else own

    def finish(self, step: int, now_s: float) -> None:
        """Send this rank's update if an exchange follows the step, which has been applied here."""
        self._ended_s.append(now_s)
        self._log_applied(self._added, now_s)
        self._added = []
        if (step + 1) % self._interval_steps:
            return
        for edge in self._outgoing:
            values = self._parameters(edge.layers).parameters() if self._averages else self._sums[edge.layers]
            self._send(edge, step, values, now_s)
        self._sums.clear()

    def drain(self) -> bool:
        """After the last step, wait for all updates still to come; return whether the optimizer must apply them.

        If so, every replica has all of them in its gradients. Parameters have been averaged already.
        """
        must_apply = self._apply_rest()
        self._publish_last()
        return must_apply

    def _apply_rest(self) -> bool:
        for incoming in self._incoming:
            incoming.wait_for(self._exchanges)
        rest = self._take(None)
        if self._averages:
            self._average(rest)
            return False
        self._compute.clear_gradients()
        for update in rest:
            self._parameters(update.edge.layers).add_gradients(update.values)
        sums = [self._first_replicas_gradients(stage) for stage in self._stages]
        # All replicas of a stage start from no gradients and add the same values, also where these leave no gradient.
        self._compute.clear_gradients()
        for stage, values in zip(self._stages, sums, strict=True):
            self._parameters((stage.first_layer, stage.end_layer)).add_gradients(values)
        self._log_applied(rest, self._clock.now_s())
        return True

    def _post(self, edge: UpdateEdge, exchange: int, arrived: Callable[[RecvHandle], None]) -> RecvHandle:
        size_bytes = HEADER.size + edge.size_bytes
        return self._transport.post(edge.sender, update_tag(exchange, edge.layers[0]), size_bytes, arrived)

    def _stop(self, step: int) -> int | None:
        """Return the first round that a step must not apply, even if it has arrived; None without such a limit."""
        return step // self._interval_steps if self._staleness_bound == 0 else None

    def _take(self, stop: int | None) -> list[Update]:
        return [update for incoming in self._incoming for update in incoming.take(stop)]

    def _subtract(self, update: Update, own: torch.Tensor, layers: tuple[int, int]) -> None:
        """Subtract an update from ``own``, the gradients of ``layers``, where their layers overlap."""
        low, high = max(update.edge.layers[0], layers[0]), min(update.edge.layers[1], layers[1])
        if low < high:
            count = self._elements(low, high)
            there, here = self._elements(update.edge.layers[0], low), self._elements(layers[0], low)
            own[here : here + count] -= update.values[there : there + count]

    def _average(self, updates: Sequence[Update]) -> None:
        # Of each sender only the newest parameters, which include those before.
        newest = {update.edge: update for update in updates}
        changes = [
            (edge.layers, (update.values - self._parameters(edge.layers).parameters()) / self._pipelines)
            for edge, update in newest.items()
        ]
        for layers, change in changes:
            parameters = self._parameters(layers)
            parameters.put_parameters(parameters.parameters() + change)
        self._log_applied(updates, self._clock.now_s())

    def _first_replicas_gradients(self, stage: Stage) -> torch.Tensor:
        """Return the gradients of a stage's first replica, on every replica. The messages belong to no step's log."""
        leader, *others = (replica.device for replica in stage.replicas)
        layers = (stage.first_layer, stage.end_layer)
        elements = self._elements(*layers)
        tag = update_tag(self._exchanges, layers[0])
        if self._device != leader and elements:
            return self._transport.post(leader, tag, elements * _ELEMENT_BYTES).wait().view(torch.float32)
        values = self._parameters(layers).gradients()
        for other in others if elements else ():
            self._transport.send(other, tag, values.view(torch.uint8), self._clock.now_s())
        return values

    def _parameters(self, layers: tuple[int, int]) -> LayerParameters:
        return self._compute.flat_parameters(*layers, self._elements(*layers))

    def _elements(self, first_layer: int, end_layer: int) -> int:
        return self._model.parameter_bytes(first_layer, end_layer) // _ELEMENT_BYTES

    def _send(self, edge: UpdateEdge, step: int, values: torch.Tensor, now_s: float) -> None:
        header = torch.frombuffer(bytearray(HEADER.pack(self._known.get(edge.receiver, 0))), dtype=torch.uint8)
        payload = torch.cat([header, values.view(torch.uint8)])
        assert payload.numel() == HEADER.size + edge.size_bytes, (edge, payload.numel())
        place = (edge.sender, edge.receiver, edge.pipelines[0], -1, -1, step)

        def event(start_s: float, end_s: float) -> Event:
            return Event(EventKind.SEND, *place, UPDATE_ACTION, start_s, end_s, edge.size_bytes)

        departed = self._recorder.sending(self._last, event, now_s)
        tag = update_tag((step + 1) // self._interval_steps - 1, edge.layers[0])
        self._transport.send(edge.receiver, tag, payload, now_s, departed)

    def _log_applied(self, updates: Sequence[Update], now_s: float) -> None:
        for update in updates:
            edge, arrived_s = update.edge, update.arrived_s
            step = (update.exchange + 1) * self._interval_steps - 1
            place = (edge.receiver, edge.sender, edge.pipelines[1], edge.stage, -1, step)
            staleness = bisect_right(self._ended_s, arrived_s) - update.known
            times_s = (arrived_s, max(now_s, arrived_s))
            self._recorder.log(Event(EventKind.UPDATE, *place, "", *times_s, edge.size_bytes, staleness))
