"""What a device of a worker does beside its steps: it sends pseudo-gradients, and takes over what outer steps made.

The first replica of each stage does so, without ever waiting, and gives the other replicas of the stage what it has
taken over. When its process has replaced a lost one, it begins with the present common parameters of all layers, and
with the optimizer's state and the buffers of another worker, which that one gives after its next step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from typing import Protocol

import torch

from executor.core.clock import RunClock
from executor.core.events import NO_STEP, EventRecorder
from executor.core.messages import CheckpointMark
from executor.recovery.checkpoint_file import LayerTensors
from executor.runtime.decoupled.common_layers import News, Sent, States, Wanted
from executor.runtime.outer.state import NoOuterState, OuterState, WithoutGradients
from executor.training.compute import LayerParameters, PacedCompute
from executor.training.real_compute import Compute
from executor.transport.transport import Transport
from executor.transport.wire_format import update_tag
from planner.adapt.migration import LayerTransfer, state_bytes
from planner.cost.synchronisation import layer_elements
from planner.events.event import MIGRATE_ACTION, OUTER_ACTION, UPDATE_ACTION, Event, EventKind
from planner.plan.decoupled import LEAD_STEPS, WorkerLayers
from planner.plan.plan import Plan, Stage
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES

# Names of tensors in checkpoints: the worker's step, what `WorkerLayers.state` says, and of a worker that was away, in
# place of all others, the step with which it goes on as one does whose process was replaced.
OWN_STEP, _EXCHANGED, AWAY = "own_step", "exchanged", "away"


class WorkerLink(Protocol):
    """A worker's end of the connection to a syncer."""

    def send(self, sent: Sent, ready_s: float, departed: Callable[[float], None]) -> None:
        """Send pseudo-gradients without waiting; ``departed`` is called with the run second of their departure."""

    def take(self) -> list[News]:
        """Return what has arrived since the last call."""

    def take_states(self) -> list[States]:
        """Return the states of layers that have arrived since the last call."""

    def take_wanted(self) -> list[Wanted]:
        """Return what other workers have asked for since the last call."""

    def give(self, device: str, states: States, ready_s: float, departed: Callable[[float], None]) -> None:
        """Send the state of layers for a device of a worker that joins, without waiting."""

    def wait(self) -> None:
        """Wait until common parameters or the state of layers arrive."""

    def mark(self, mark: CheckpointMark) -> None:
        """Say that what was sent before is in the worker's part of a checkpoint, and nothing that will be."""

    def end(self) -> None:
        """Say that nothing more is sent."""

    def await_end(self) -> None:
        """Wait for the last outer steps of all workers."""


@dataclass(eq=False)
class DecoupledUpdates(WithoutGradients):
    """The exchanges of one rank with the syncers.

    Args:
        plan: The plan of the run.
        scenario: The scenario of the run.
        first_step: The worker's first step of this session.
        joins: Whether the worker takes over the present parameters before that step.
        links: The connections to the syncers, by device; empty unless this rank is the first replica of a stage.
        restored: The state of layers before ``first_step`` as `tensors` returned it, by layer.
    """

    plan: InitVar[Plan]
    scenario: InitVar[Scenario]
    _device: str
    first_step: InitVar[int]
    joins: InitVar[bool]
    _links: Mapping[str, WorkerLink]
    _transport: Transport
    _compute: Compute
    _clock: RunClock
    _recorder: EventRecorder
    restored: InitVar[Mapping[int, LayerTensors]]

    def __post_init__(
        self, plan: Plan, scenario: Scenario, first_step: int, joins: bool, restored: Mapping[int, LayerTensors]
    ) -> None:
        how = plan.synchronisation
        fragments = how.outer.fragment_layers(len(scenario.model.layers))
        fragment_of = {layer: index for index, own in enumerate(fragments) for layer in own}
        self._syncer = {layer: how.outer.syncer(fragment) for layer, fragment in fragment_of.items()}
        self._worker, self._stages = _place(plan, self._device)
        self._bytes = [layer.parameter_bytes for layer in scenario.model.layers]
        # The state of a layer as it moves to another device.
        self._moves = [
            LayerTransfer("", "", layer, layer + 1, state_bytes(scenario, layer, layer + 1))
            for layer in range(len(self._bytes))
        ]
        stage, elements = layer_elements(plan, scenario)[self._worker].get(self._device, (-1, {}))
        self._first_stage, self._elements, self._outer = stage, elements, how.outer
        # Whoever joins takes over everything, whatever an earlier run has left.
        restored = {} if joins else {layer: found for layer, found in restored.items() if layer in elements}
        earlier = {layer: _numbers(found[_EXCHANGED]) for layer, found in restored.items()}
        own = {layer: fragment_of[layer] for layer in elements}
        self._layers = WorkerLayers(self._worker, how.interval_steps, how.outer, own, first_step, earlier)
        self._state: OuterState | NoOuterState
        if isinstance(self._compute, PacedCompute):
            self._state = NoOuterState(how.outer, elements.__getitem__)
        else:
            self._state = OuterState(how.outer, self._parameters, elements, restored)
        # What has arrived and is not taken note of, by syncer, with the step before which it was seen.
        self._held: dict[str, list[tuple[News, int]]] = {syncer: [] for syncer in self._links}
        self._marked = -1
        # The last message that has brought each layer, with the layer's part, until the layer is taken over.
        self._news: dict[int, tuple[str, News, torch.Tensor]] = {}
        self._joins = joins
        self._next_step = first_step

    @property
    def versions(self) -> Mapping[int, int]:
        """The versions of the layers that this rank has taken over last."""
        return {layer: self._layers.state(layer)[1] for layer in self._elements}

    def set_plan(self, step: int, plan: Plan) -> None:
        """Do nothing, since the plan never changes."""

    def begin(self, step: int) -> float:
        """Take over what has arrived; return the run second until which the step waits: minus infinity.

        A process that has replaced a lost one waits for the present parameters and the state of all layers.
        """
        joins, self._joins = self._joins, False
        if joins:
            self._await_layers()
        else:
            self._receive(step)
        changed = self._take_over(step, joins=joins)
        for stage in self._stages:
            self._share(stage, step, changed, with_state=joins)
        return self._clock.now_s() if joins else float("-inf")

    def finish(self, step: int, now_s: float) -> None:
        """Send the pseudo-gradients that follow a step, which ended at run second ``now_s``."""
        self._next_step = step + 1
        by_syncer: defaultdict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        contributions = self._layers.send(step, now_s)
        for layer in contributions:
            (by_syncer[self._syncer[layer]][layer],) = self._state.pack(layer)
        for syncer, packed in by_syncer.items():
            sent = Sent({layer: contributions[layer] for layer in packed}, torch.cat(list(packed.values())))
            row = (EventKind.SEND, self._worker, step, UPDATE_ACTION)
            self._links[syncer].send(sent, now_s, self._departed(syncer, *row, sent.payload, now_s))
        self._give(now_s)

    def drain(self) -> bool:
        """After the last step, wait for the last outer steps of all workers, and take them over; return False."""
        for link in self._links.values():
            link.end()
        for link in self._links.values():
            link.await_end()
        self._receive(None)
        changed = self._take_over(None)
        for stage in self._stages:
            self._share(stage, self._next_step, changed, with_state=False)
        return False

    def state(self, step: int) -> Mapping[int, LayerTensors]:
        """Return the state of this rank's layers before a step of the worker, by layer, for a checkpoint."""
        found: dict[int, LayerTensors] = {}
        for layer in (layer for stage in self._stages for layer in stage.layers):
            own = {OWN_STEP: torch.tensor([step])}
            if layer in self._elements:
                own |= {_EXCHANGED: torch.tensor(self._layers.state(layer)), **self._state.tensors(layer)}
            found[layer] = own
        return found

    def mark(self, mark: CheckpointMark) -> None:
        """Tell the syncers that the worker's state was copied for a checkpoint."""
        self._marked = mark.checkpoint
        for link in self._links.values():
            link.mark(mark)

    # --- the state of a worker that joins ---

    def _await_layers(self) -> None:
        """Wait for the parameters of all layers, and put the state of each that another worker gives."""
        without_state = set(self._elements)
        while True:
            self._receive(None)
            for syncer, link in self._links.items():
                for states in link.take_states():
                    self._put_states(syncer, states)
                    without_state -= set(states.layers)
            lacking = without_state | (self._elements.keys() - self._news.keys())
            if not lacking:
                return
            for syncer in {self._syncer[layer] for layer in lacking}:
                self._links[syncer].wait()

    def _put_states(self, syncer: str, states: States) -> None:
        if not states.payload.numel():
            return
        place = (self._device, syncer, -1, -1, -1, -1, MIGRATE_ACTION)
        # Only marks the arrival, for the row of the sender.
        marked = Event(EventKind.RECEIVE, *place, states.arrived_s, states.arrived_s, states.payload.numel())
        self._recorder.log(marked)
        sizes = [self._compute.state_bytes(self._moves[layer]) for layer in states.layers]
        for layer, part in zip(states.layers, torch.split(states.payload, sizes), strict=True):
            self._compute.put_layer_state(self._moves[layer], part.clone())

    def _give(self, now_s: float) -> None:
        """Send the present state of layers to whoever has asked for it."""
        for syncer, link in self._links.items():
            for wanted in link.take_wanted():
                payload = torch.cat([self._compute.layer_state(self._moves[layer]) for layer in wanted.layers])
                row = (EventKind.MIGRATE, -1, -1, MIGRATE_ACTION)
                departed = self._departed(syncer, *row, payload, now_s)
                link.give(wanted.device, States(wanted.layers, payload), now_s, departed)

    # --- what arrives ---

    def _receive(self, step: int | None) -> None:
        """Take note of what has arrived before a step.

        What a syncer sent after it had copied its state for a checkpoint must not be in the worker's copy, and is held
        back until that is made. The head has the copy made before one of the next `LEAD_STEPS` steps, or not at all.
        With None nothing is held back.
        """
        for syncer, link in self._links.items():
            held = self._held[syncer]
            for news in link.take():
                held.append((news, self._next_step))
                place = (self._device, syncer, self._worker, -1, -1, news.newest)
                times_s = (news.arrived_s, news.arrived_s)
                # Only marks the arrival, for the row of the sender.
                self._recorder.log(Event(EventKind.RECEIVE, *place, UPDATE_ACTION, *times_s, news.payload.numel()))
            while held:
                news, seen_step = held[0]
                if step is not None and news.snapshot > self._marked and step <= seen_step + LEAD_STEPS:
                    break
                held.pop(0)
                sizes = [FLOAT32_BYTES * self._elements[layer] for layer in news.versions]
                for layer, part in zip(news.versions, torch.split(news.payload, sizes), strict=True):
                    self._layers.arrive(layer, *news.versions[layer])
                    self._news[layer] = (syncer, news, part)

    def _take_over(self, step: int | None, *, joins: bool = False) -> Iterable[int]:
        """Take over what is due before a step, or everything at the end of the run; return the layers."""
        taken = self._layers.take_over(step)
        brought: dict[int, tuple[str, News, list[int]]] = {}
        for layer, is_answer in taken.items():
            syncer, news, part = self._news.pop(layer)
            state = self._state
            change = state.replace if joins else state.take_over if is_answer else state.follow
            # The bytes need not be aligned to 4 bytes; their copy is.
            change(layer, part.clone().view(torch.float32))
            brought.setdefault(id(news), (syncer, news, []))[2].append(layer)
        done, now_s = self._next_step if step is None else step, self._clock.now_s()
        for syncer, news, layers in brought.values():
            missed = max(done - 1 - news.versions[layer][1] for layer in layers)
            size_bytes = FLOAT32_BYTES * sum(self._elements[layer] for layer in layers)
            place = (self._device, syncer, self._worker, self._first_stage, -1, news.newest)
            times_s = (news.arrived_s, max(news.arrived_s, now_s))
            self._recorder.log(Event(EventKind.UPDATE, *place, OUTER_ACTION, *times_s, size_bytes, missed))
        return taken

    def _share(self, stage: Stage, step: int, changed: Iterable[int], *, with_state: bool) -> None:
        """Give the other replicas of a stage the layers that the first one has taken over; not logged.

        The others do not know which these are, so that a byte for each layer tells them. With ``with_state`` they get
        the optimizer's state and the buffers too.
        """
        leader, *others = (replica.device for replica in stage.replicas)
        if not others:
            return
        announced, follows = (update_tag(2 * step + number, stage.first_layer) for number in range(2))
        if self._device != leader:
            flags = self._transport.post(leader, announced, len(stage.layers)).wait()
            own = [layer for layer, flag in zip(stage.layers, flags.tolist(), strict=True) if flag]
            if own:
                sizes = [self._shared_bytes(layer, with_state=with_state) for layer in own]
                values = self._transport.post(leader, follows, sum(sizes)).wait()
                for layer, part in zip(own, torch.split(values, sizes), strict=True):
                    if with_state:
                        self._compute.put_layer_state(self._moves[layer], part.clone())
                    else:
                        self._parameters(layer).put_parameters(part.clone().view(torch.float32))
            return
        own = [layer for layer in stage.layers if layer in set(changed)]
        flags = torch.tensor([layer in own for layer in stage.layers], dtype=torch.uint8)
        for other in others:
            self._transport.send(other, announced, flags, self._clock.now_s())
            if own:
                values = torch.cat([self._shared(layer, with_state=with_state) for layer in own])
                self._transport.send(other, follows, values, self._clock.now_s())

    def _shared_bytes(self, layer: int, *, with_state: bool) -> int:
        return self._compute.state_bytes(self._moves[layer]) if with_state else self._bytes[layer]

    def _shared(self, layer: int, *, with_state: bool) -> torch.Tensor:
        if with_state:
            return self._compute.layer_state(self._moves[layer])
        return self._parameters(layer).parameters().view(torch.uint8)

    def _departed(
        self, syncer: str, kind: EventKind, worker: int, step: int, action: str, payload: torch.Tensor, start_s: float
    ) -> Callable[[float], None]:
        place = (self._device, syncer, worker, -1, -1, step, action)
        size_bytes = payload.numel()

        def row(start_s: float, end_s: float) -> Event:
            return Event(kind, *place, start_s, end_s, size_bytes)

        return self._recorder.sending(NO_STEP, row, start_s)

    def _parameters(self, layer: int) -> LayerParameters:
        return self._compute.flat_parameters(layer, layer + 1, self._bytes[layer] // FLOAT32_BYTES)


def _numbers(values: torch.Tensor) -> tuple[int, int, int]:
    counted, base, sent = values.tolist()
    return counted, base, sent


def _place(plan: Plan, device: str) -> tuple[int, list[Stage]]:
    """Return the pipeline of a device and its stages."""
    for index, pipeline in enumerate(plan.pipelines):
        own = [stage for stage in pipeline.stages if any(replica.device == device for replica in stage.replicas)]
        if own:
            return index, own
    raise AssertionError(f"no pipeline uses '{device}'")
