"""Outer steps of pipelines that train separately: diloco and diloco-streaming (see `planner.plan.outer_step`).

After the step that an exchange follows, the first replica of each stage sends its pseudo-gradients to the other
pipelines, without waiting. Before the step that comes ``overlap_steps`` steps after the next one, it waits for those of
the others, takes the outer step, and sends the other replicas of the stage their new parameters. With an overlap of 0
this is a barrier between the pipelines. At the end of the run all outer steps that are still to come are taken, and so
they are before a step with which the settings of the exchanges change.

With ``reduce-scatter`` pipelines get only their parts of the pseudo-gradients. A rank sends the means of its part when
it has all of them: mostly the thread that receives the last one, while the rank trains, or else the rank with its own.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.recovery.checkpoint_file import LayerTensors
from executor.runtime.outer.state import NoOuterState, OuterState, WithoutGradients
from executor.runtime.update_messages import IncomingUpdates, Update, UpdateMessages
from executor.training.compute import LayerParameters, PacedCompute
from executor.training.real_compute import Compute
from executor.transport.transport import Transport
from executor.transport.wire_format import update_tag
from planner.adapt.worker_moves import same_workers
from planner.cost.synchronisation import UpdateEdge
from planner.plan.outer_step import FragmentExchanges, fragment_exchanges
from planner.plan.plan import Plan, Stage, Synchronisation
from planner.scenario.profile import ModelProfile
from planner.scenario.training import FLOAT32_BYTES


@dataclass(eq=False)
class OuterUpdates(WithoutGradients):
    """Sends one rank's pseudo-gradients to other pipelines, and takes outer steps.

    Args:
        plan: The first plan. The first replicas of its stages exchange pseudo-gradients.
        edges_of: Returns every pair of devices between which a plan sends pseudo-gradients, with the layers.
        first_step: The first step of the session.
        steps: Number of the step after the last one.
        restored: The outer state of layers before ``first_step``, from a checkpoint or copies; by layer.
        may_change: Whether later plans may have other settings of the exchanges.
    """

    plan: InitVar[Plan]
    _edges_of: Callable[[Plan], Sequence[UpdateEdge]]
    _device: str
    _first_step: int
    _steps: int
    _transport: Transport
    _compute: Compute
    _model: ModelProfile
    _clock: RunClock
    _recorder: EventRecorder
    restored: InitVar[Mapping[int, LayerTensors]]
    may_change: bool = False

    def __post_init__(self, plan: Plan, restored: Mapping[int, LayerTensors]) -> None:
        outer = plan.synchronisation.outer
        self._settled_before = self._first_step - outer.overlap_steps - 1
        self._assign(plan)
        self._state: OuterState | NoOuterState
        if isinstance(self._compute, PacedCompute):
            self._state = NoOuterState(outer, lambda layer: self._elements(layer, layer + 1))
        else:
            own = self._own_layers()
            self._state = OuterState(outer, lambda layer: self._parameters(layer, layer + 1), own, restored)
        # What this rank adds to the mean of each layer, as it was sent: its pseudo-gradients, or the mean of its part.
        self._own: dict[int, torch.Tensor] = {}
        # Updates until the outer step that applies them, by fragment.
        self._received = defaultdict[int, list[Update]](list)
        # All parts of this rank's pseudo-gradients as they are sent, by layer; with reduce-scatter until this rank has
        # the mean of its own, and after which step they were sent, and when, by fragment. Threads that receive take
        # them, too.
        self._parts: dict[int, list[torch.Tensor]] = {}
        self._unaveraged: dict[int, tuple[int, float]] = {}
        self._exchanges: Sequence[FragmentExchanges] = ()
        self._begin_part(self._first_step, plan)
        if not self.may_change:
            self._messages.expect_before(self._steps)

    def _begin_part(self, step: int, plan: Plan) -> None:
        """Begin the exchanges of a plan with a step before which no pseudo-gradient is under way."""
        how, self._plan = plan.synchronisation, plan
        self._weights = dict(enumerate(plan.exchange_weights))
        self._fragments = how.outer.fragment_runs(len(self._model.layers))
        self._exchanges = fragment_exchanges(*how.exchange_settings, step, self._exchanges)
        # By fragment, so that the mean of one does not hold up the step that sends another.
        self._averaging = [threading.Lock() for _ in self._fragments]
        self._messages = UpdateMessages(
            self._device,
            self._edges_of(plan),
            self._exchanges.__getitem__,
            step,
            self._steps - 1,
            self._transport,
            self._clock,
            self._recorder,
            lambda edge: self._send_means(edge.fragment),
        )
        self._state.use(how.outer)

    def set_plan(self, step: int, plan: Plan) -> None:
        """Replace the plan from ``step`` on by another one; each worker has the same first replicas, or is a new one.

        If workers come or go, or the settings of exchanges or the weights of pipelines change, take all outer steps
        that are under way.
        """
        stays = same_workers(self._plan, plan)
        if stays and plan.exchange_set_up == self._plan.exchange_set_up:
            self._assign(plan)
            return
        self._compute.wait_until(self._take_all(step))
        self._settled_before = step
        self._assign(plan)
        self._begin_part(step, plan)
        if not stays:
            self._state.keep(self._own_layers())

    def take_over(self, received: Mapping[int, LayerTensors]) -> None:
        """Take over the outer state of layers that this rank begins to exchange."""
        for layer, tensors in received.items():
            self._state.put(layer, tensors)

    def regroup(self, step: int, anew: Collection[int]) -> None:
        """Begin a session before a step from copies: take the outer steps whose pseudo-gradients are averaged already.

        The pipelines ``anew`` begin with the common parameters.
        """
        for layer in self._own_layers():
            if self._state.has_mean(layer):
                self._state.step(layer)
            if self._pipeline in anew:
                self._state.replace(layer, self._state.common(layer))
        self._share_all(step)

    def begin_anew(self, step: int, pipelines: Collection[int]) -> None:
        """Begin with the common parameters before a step, if this rank's pipeline is among those given."""
        if self._pipeline in pipelines:
            for layer in self._own_layers():
                self._state.replace(layer, self._state.common(layer))
            self._share_all(step)

    def _share_all(self, step: int) -> None:
        """Give the other replicas of this rank's stages all parameters before a step."""
        for fragment in range(len(self._fragments)):
            for stage in self._stages:
                # An outer step before this step has its tag.
                self._share(stage, fragment, step - 1)

    def _assign(self, plan: Plan) -> None:
        own = [
            (index, stage)
            for index, pipeline in enumerate(plan.pipelines)
            for stage in pipeline.stages
            if any(replica.device == self._device for replica in stage.replicas)
        ]
        self._pipeline = own[0][0] if own else -1
        self._stages = [stage for _, stage in own]

    def _own_layers(self) -> list[int]:
        """Return the layers whose exchanges this rank makes."""
        return [layer for stage in self._stages if self._leads(stage) for layer in stage.layers]

    def _leads(self, stage: Stage) -> bool:
        return stage.replicas[0].device == self._device

    def begin(self, step: int) -> float:
        """Take the outer steps before a step; return the run second at which the last message for them arrived.

        It is minus infinity if there is none.
        """
        self._messages.hold_last(step)
        self._messages.expect_before(step + 1)
        ready_s = self._messages.wait_before(step - self._overlap_steps)
        self._take_outer_steps(step - self._overlap_steps - 1, step)
        self._messages.note_arrivals(step)
        return ready_s

    def finish(self, step: int, now_s: float) -> None:
        """End a step, applied at run second ``now_s``; if an exchange follows, send pseudo-gradients."""
        self._messages.end_step(now_s)
        for fragment in self._exchanged_after(step):
            led = self._led(fragment)
            self._parts |= {layer: self._state.pack(layer, self._part_count) for layer in led}
            for edge in self._outgoing(fragment, of_means=False):
                packed = [self._parts[layer][edge.part or 0] for layer in range(*edge.layers)]
                self._messages.send(edge, step, torch.cat(packed), now_s)
            if self._part_count > 1:
                self._unaveraged[fragment] = (step, now_s)
                self._send_means(fragment)
            else:
                self._own |= {layer: self._parts.pop(layer)[0] for layer in led}

    def drain(self) -> bool:
        """After the last step, take all outer steps that are still to come.

        Returns:
            False: the optimizer has nothing to apply.
        """
        self._take_all(self._steps)
        self._messages.publish()
        return False

    def state(self, step: int) -> Mapping[int, LayerTensors]:
        """Wait for the pseudo-gradients that were sent before a step; return the outer state before it, by layer."""
        self._compute.wait_until(self._messages.wait_before(step))
        for sent in range(step - self._overlap_steps - 1, step):
            self._average(sent)
        led = sorted(layer for fragment in range(len(self._fragments)) for layer in self._led(fragment))
        return {layer: self._state.tensors(layer) for layer in led}

    # --- means of parts ---

    @property
    def _part_count(self) -> int:
        return self._how.outer.parts(len(self._weights))

    def _send_means(self, fragment: int) -> None:
        """Send the mean of this pipeline's part of a fragment, if all that it needs is there, and only once."""
        if fragment not in self._unaveraged:
            # A thread may come so late that there are other fragments by now.
            return
        with self._averaging[fragment]:
            if fragment not in self._unaveraged:
                return
            step, ready_s = self._unaveraged[fragment]
            incoming = self._incoming(fragment, of_means=False)
            count = self._exchanges[fragment].before(step + 1)
            if any(each.arrived < count for each in incoming):
                return
            updates = [update for each in incoming for update in each.take(count)]
            found = self._by_layer(updates)
            for layer in self._led(fragment):
                found[layer][self._pipeline] = self._parts.pop(layer)[self._pipeline]
                self._own[layer] = self._state.average_part(layer, self._pipeline, found[layer], self._weights)
            self._received[fragment] += updates
            ready_s = max((ready_s, *(update.arrived_s for update in updates)))
            for edge in self._outgoing(fragment, of_means=True):
                self._messages.send(edge, step, torch.cat([self._own[layer] for layer in range(*edge.layers)]), ready_s)
            # Only now, so that whoever finds the fragment missing finds the mean.
            del self._unaveraged[fragment]

    # --- outer steps ---

    def _exchanged_after(self, step: int) -> list[int]:
        """Return the fragments that are exchanged after a step."""
        return [fragment for fragment, exchanges in enumerate(self._exchanges) if exchanges.follows(step)]

    @property
    def _how(self) -> Synchronisation:
        return self._plan.synchronisation

    @property
    def _overlap_steps(self) -> int:
        return self._how.outer.overlap_steps

    def _take_all(self, step: int) -> float:
        """Take all outer steps of exchanges before a step; return when the last message for them arrived."""
        ready_s = self._messages.wait_before(step)
        for sent in range(step - self._overlap_steps - 1, step):
            self._take_outer_steps(sent, step)
        return ready_s

    def _take_outer_steps(self, sent: int, step: int) -> None:
        """Take the outer steps of the exchanges after step ``sent``, before ``step``; messages must have arrived."""
        if sent < self._settled_before:
            return
        self._average(sent)
        for fragment in self._exchanged_after(sent):
            for layer in self._led(fragment):
                if self._state.has_mean(layer):
                    self._state.step(layer)
            self._messages.log_applied(self._received.pop(fragment, ()), self._clock.now_s())
            for stage in self._stages:
                self._share(stage, fragment, step)

    def _average(self, sent: int) -> None:
        """Average the pseudo-gradients sent after step ``sent`` of this run, unless this was done."""
        for fragment in self._exchanged_after(sent) if sent >= self._first_step else ():
            # The thread that has received the last part may not have come to it yet.
            self._send_means(fragment)
            led = [layer for layer in self._led(fragment) if layer in self._own]
            stop = self._exchanges[fragment].before(sent + 1)
            incoming = self._incoming(fragment, of_means=self._part_count > 1)
            updates = [update for each in incoming for update in each.take(stop)]
            found = self._by_layer(updates)
            self._received[fragment] += updates
            for layer in led:
                found[layer][self._pipeline] = self._own.pop(layer)
                if self._part_count > 1:
                    self._state.join(layer, found[layer], self._part_count)
                else:
                    self._state.average(layer, found[layer], self._weights)

    def _incoming(self, fragment: int, *, of_means: bool) -> list[IncomingUpdates]:
        edges = ((each, each.edge) for each in self._messages.incoming)
        return [each for each, edge in edges if edge.fragment == fragment and edge.carries_means == of_means]

    def _outgoing(self, fragment: int, *, of_means: bool) -> list[UpdateEdge]:
        edges = self._messages.outgoing
        return [edge for edge in edges if edge.fragment == fragment and edge.carries_means == of_means]

    def _by_layer(self, updates: Iterable[Update]) -> defaultdict[int, dict[int, torch.Tensor]]:
        """Return the bytes of each layer in updates, by layer and pipeline."""
        found: defaultdict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        for update in updates:
            edge, layers = update.edge, range(*update.edge.layers)
            sizes = [self._packed_bytes(layer, edge.part) for layer in layers]
            for layer, values in zip(layers, update.payload.split_with_sizes(sizes), strict=True):
                found[layer][edge.pipelines[0]] = values
        return found

    def _led(self, fragment: int) -> list[int]:
        """Return the layers of a fragment whose exchanges this rank makes."""
        return [
            layer
            for stage in self._stages
            if self._leads(stage)
            for start, stop in self._runs(stage, fragment)
            for layer in range(start, stop)
        ]

    def _runs(self, stage: Stage, fragment: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of layers of a fragment in a stage."""
        for start, stop in self._fragments[fragment]:
            first, end = max(start, stage.first_layer), min(stop, stage.end_layer)
            if first < end:
                yield first, end

    def _share(self, stage: Stage, fragment: int, step: int) -> None:
        """Give the other replicas of a stage the first one's parameters; the messages are not logged."""
        leader, *others = (replica.device for replica in stage.replicas)
        for first, end in self._runs(stage, fragment) if others else ():
            elements = self._elements(first, end)
            tag = update_tag(step, first)
            if not elements:
                continue
            if self._device != leader:
                values = self._transport.post(leader, tag, elements * FLOAT32_BYTES).wait().view(torch.float32)
                self._parameters(first, end).put_parameters(values)
                continue
            values = self._parameters(first, end).parameters()
            for other in others:
                self._transport.send(other, tag, values.view(torch.uint8), self._clock.now_s())

    def _parameters(self, first_layer: int, end_layer: int) -> LayerParameters:
        return self._compute.flat_parameters(first_layer, end_layer, self._elements(first_layer, end_layer))

    def _packed_bytes(self, layer: int, part: int | None) -> int:
        return self._how.outer.part_bytes(self._elements(layer, layer + 1), part, len(self._weights))

    def _elements(self, first_layer: int, end_layer: int) -> int:
        return self._model.parameter_bytes(first_layer, end_layer) // FLOAT32_BYTES
