"""Updates that pipelines send each other without waiting: asgd, asgd-ga and ma (see `planner.cost.synchronisation`).

With asgd and asgd-ga an update contains gradients. The receiver adds them to the gradients of its current step, before
the replicas of the stage sum these; so all replicas apply the update in the same step. With plain SGD without clipping
the parameters of all pipelines change by the same gradients in the end, each pipeline's at another time. With ma an
update contains parameters. Before its next step the receiver averages them with its own: the newest parameters of each
pipeline that has sent any since the last average, all with equal weight. The first replica of a stage does so, and
sends the others the result.

With a staleness bound of 0 a step applies exactly the updates of earlier steps, so that training does not depend on
arrival times. After its last step a pipeline waits for all updates that were sent to it, and applies them in one more
update. If the number of steps is no multiple of ``interval_steps``, the gradients (with ma, the parameters) of the
steps after the last exchange are not sent, unless the run writes checkpoints.

Before a checkpoint pipelines settle: each waits for the updates of all earlier steps and applies them. With ma, and
with plain SGD without clipping, the parameters of all pipelines are then equal.
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.runtime.update_messages import Update, UpdateMessages
from executor.training.compute import LayerParameters
from executor.training.real_compute import Compute
from executor.transport.transport import Transport
from executor.transport.wire_format import update_tag
from planner.cost.synchronisation import UpdateEdge
from planner.plan.exchange_steps import Exchanges
from planner.plan.plan import Plan, Stage
from planner.scenario.profile import ModelProfile
from planner.scenario.training import FLOAT32_BYTES


@dataclass(eq=False)
class PipelineUpdates:
    """Sends one rank's updates to other pipelines, and applies theirs.

    Args:
        plan: The first plan; later ones have the same first replicas of stages, which exchange the updates.
        edges: Every pair of devices between which updates are sent, with the layers.
        exchanges: After which steps updates are sent, and before which steps pipelines settle.
        may_change: Whether later plans may exchange updates after another number of steps. Receives are then posted
            only for exchanges that are known to happen.
    """

    plan: InitVar[Plan]
    edges: InitVar[Sequence[UpdateEdge]]
    _device: str
    _exchanges: Exchanges
    _transport: Transport
    _compute: Compute
    _model: ModelProfile
    _clock: RunClock
    _recorder: EventRecorder
    may_change: InitVar[bool] = False

    def __post_init__(self, plan: Plan, edges: Sequence[UpdateEdge], may_change: bool) -> None:
        self._averages = plan.synchronisation.method == "ma"
        self._pipelines = len(plan.pipelines)
        self._assign(plan)
        self._last = self._exchanges.steps - 1
        self._sent = 0
        common = (self._exchanges.first_step, self._last, self._transport, self._clock, self._recorder)
        self._messages = UpdateMessages(self._device, edges, lambda fragment: self._exchanges, *common)
        # Gradients of the steps since the last exchange, by layers.
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        # Received updates in the gradients of the current step.
        self._added: list[Update] = []
        if not may_change:
            self._messages.expect_before(self._exchanges.steps)

    def set_plan(self, step: int, plan: Plan) -> None:
        """Replace the plan from ``step`` on by another one with the same first replicas of stages.

        If the interval changes, the sums of the steps since the last exchange are sent at once.
        """
        self._assign(plan)
        self._exchanges.change(step, plan.synchronisation.interval_steps)
        if self._exchanges.before(step) > self._sent:
            self._exchange(step - 1, self._clock.now_s())

    def _assign(self, plan: Plan) -> None:
        self._staleness_bound = plan.synchronisation.staleness_bound
        self._stages = [
            stage for stage in plan.stages if any(replica.device == self._device for replica in stage.replicas)
        ]

    def begin(self, step: int) -> float:
        """Wait for the updates that the staleness bound demands before a step; with ma, average the parameters.

        Returns:
            The run second at which the last of these updates arrived; minus infinity if none was demanded.
        """
        self._messages.hold_last(step)
        self._messages.expect_before(step + 1)
        ready_s = float("-inf")
        if self._staleness_bound is not None:
            ready_s = self._messages.wait_before(step - self._staleness_bound)
        if self._averages:
            self._average(self._take(self._stop(step)), step)
        self._messages.note_arrivals(step)
        return ready_s

    def settles(self, step: int) -> bool:
        """Return whether pipelines settle before a step."""
        return self._exchanges.settles(step)

    def settle(self, step: int) -> bool:
        """Wait for all updates of the steps before ``step``; return whether the optimizer must apply them."""
        return self._apply_rest(step)

    def add(self, step: int) -> None:
        """With asgd and asgd-ga, add the received gradients to those of the step."""
        if not self._averages:
            self._added = self._take(self._stop(step))
            for update in self._added:
                self._parameters(update.edge.layers).add_gradients(update.values)

    def accumulate(self) -> None:
        """With asgd and asgd-ga, add the step's gradients to the next update; replicas must have summed them before."""
        if self._averages:
            return
        for layers in {edge.layers for edge in self._messages.outgoing}:
            own = self._parameters(layers).gradients()
            # Received gradients are not sent on: every pipeline sends its own to all others.
            for update in self._added:
                self._subtract(update, own, layers)
            self._sums[layers] = self._sums[layers] + own if layers in self._sums else own

    def finish(self, step: int, now_s: float) -> None:
        """End a step, applied at run second ``now_s``; if an exchange follows the step, send this rank's update."""
        self._messages.end_step(now_s)
        self._messages.log_applied(self._added, now_s)
        self._added = []
        if not self._exchanges.follows(step):
            return
        self._exchange(step, now_s)

    def _exchange(self, step: int, now_s: float) -> None:
        """Send this rank's update of the steps up to ``step``."""
        self._sent += 1
        for edge in self._messages.outgoing:
            values = self._parameters(edge.layers).parameters() if self._averages else self._sums[edge.layers]
            self._messages.send(edge, step, values, now_s)
        self._sums.clear()

    def drain(self) -> bool:
        """After the last step, wait for all remaining updates; return whether the optimizer must apply them.

        With asgd and asgd-ga it must: on every replica, the gradients are now the sum of these updates. With ma the
        parameters have been averaged.
        """
        must_apply = self._apply_rest(self._last + 1)
        self._messages.publish()
        return must_apply

    def _apply_rest(self, step: int) -> bool:
        """Wait for all updates of the steps before ``step``, and apply those that are not applied yet."""
        self._messages.expect_before(step)
        self._messages.wait_before(step)
        rest = self._take(self._exchanges.before(step))
        if self._averages:
            self._average(rest, step)
            return False
        self._compute.clear_gradients()
        for update in rest:
            self._parameters(update.edge.layers).add_gradients(update.values)
        sums = [self._first_replicas_gradients(stage, step) for stage in self._stages]
        # Drop the gradients again, so that all replicas get exactly the values of the first one.
        self._compute.clear_gradients()
        for stage, values in zip(self._stages, sums, strict=True):
            self._parameters((stage.first_layer, stage.end_layer)).add_gradients(values)
        self._messages.log_applied(rest, self._clock.now_s())
        return True

    def _stop(self, step: int) -> int | None:
        """Return the first exchange that a step must not apply, even if it has arrived; None if there is no limit."""
        if self._staleness_bound == 0:
            return self._exchanges.before(step)
        # The parameters before a checkpoint are averaged by all pipelines at once, so that they become equal.
        return self._exchanges.last_before_settling(step) if self._averages else None

    def _take(self, stop: int | None) -> list[Update]:
        return [update for incoming in self._messages.incoming for update in incoming.take(stop)]

    def _subtract(self, update: Update, own: torch.Tensor, layers: tuple[int, int]) -> None:
        """Subtract an update from ``own``, the gradients of ``layers``, in the layers that both contain."""
        low, high = max(update.edge.layers[0], layers[0]), min(update.edge.layers[1], layers[1])
        if low < high:
            count = self._elements(low, high)
            there, here = self._elements(update.edge.layers[0], low), self._elements(layers[0], low)
            own[here : here + count] -= update.values[there : there + count]

    def _average(self, updates: Sequence[Update], step: int) -> None:
        """Average received parameters with those of this rank's stages, on every replica, before ``step``."""
        # The newest parameters of each sender replace its earlier ones.
        newest = {update.edge: update for update in updates}
        changes = [
            (edge.layers, (update.values - self._parameters(edge.layers).parameters()) / self._pipelines)
            for edge, update in newest.items()
        ]
        for layers, change in changes:
            parameters = self._parameters(layers)
            parameters.put_parameters(parameters.parameters() + change)
        for stage in self._stages:
            self._share_average(stage, step, changed=bool(updates))
        self._messages.log_applied(updates, self._clock.now_s())

    def _share_average(self, stage: Stage, step: int, *, changed: bool) -> None:
        """Give the other replicas of a stage the first one's parameters if ``changed``; the messages are not logged.

        The others do not know which updates have arrived, so that a byte tells them whether parameters follow.
        """
        leader, *others = (replica.device for replica in stage.replicas)
        layers = (stage.first_layer, stage.end_layer)
        elements = self._elements(*layers)
        announced, follows = (update_tag(2 * step + number, layers[0]) for number in range(2))
        if not elements:
            return
        if self._device != leader:
            if self._transport.post(leader, announced, 1).wait().item():
                values = self._transport.post(leader, follows, elements * FLOAT32_BYTES).wait().view(torch.float32)
                self._parameters(layers).put_parameters(values)
            return
        for other in others:
            self._transport.send(other, announced, torch.tensor([changed], dtype=torch.uint8), self._clock.now_s())
            if changed:
                values = self._parameters(layers).parameters()
                self._transport.send(other, follows, values.view(torch.uint8), self._clock.now_s())

    def _first_replicas_gradients(self, stage: Stage, step: int) -> torch.Tensor:
        """Return the gradients of a stage's first replica before ``step``, on every replica, by unlogged messages."""
        leader, *others = (replica.device for replica in stage.replicas)
        layers = (stage.first_layer, stage.end_layer)
        elements = self._elements(*layers)
        tag = update_tag(step, layers[0])
        if self._device != leader and elements:
            return self._transport.post(leader, tag, elements * FLOAT32_BYTES).wait().view(torch.float32)
        values = self._parameters(layers).gradients()
        for other in others if elements else ():
            self._transport.send(other, tag, values.view(torch.uint8), self._clock.now_s())
        return values

    def _parameters(self, layers: tuple[int, int]) -> LayerParameters:
        return self._compute.flat_parameters(*layers, self._elements(*layers))

    def _elements(self, first_layer: int, end_layer: int) -> int:
        return self._model.parameter_bytes(first_layer, end_layer) // FLOAT32_BYTES
