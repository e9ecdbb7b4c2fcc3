"""Copies of the layers' state in memory, from which a run resumes when ranks are lost.

Every few steps each rank copies the state of its layers before the step, and sends layers that no other rank trains to
a backup rank (planner/adapt/migration.py). When all copies before a step are complete, the head informs the ranks of
this with the next plan, and they drop older copies. At most `MOST_INCOMPLETE_BACKUPS` steps have incomplete copies at a
time; if links are slow, further copies are skipped.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch

from executor.core.clock import RunClock
from executor.core.events import EventRecorder
from executor.core.job import RunConfig
from executor.recovery.checkpoint_file import LayerTensors
from executor.recovery.checkpoints import CheckpointFolder
from executor.training.real_compute import Compute, RealCompute
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import backup_tag
from planner.adapt.copies import Copies, layers_of
from planner.adapt.migration import MOST_INCOMPLETE_BACKUPS, LayerTransfer, backup_moves, state_bytes
from planner.events.event import BACKUP_ACTION, Event, EventKind
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario

# Returns the state of the outer step before a step, by layer.
OuterStates = Callable[[int], Mapping[int, LayerTensors]]


def one_layer(scenario: Scenario, layer: int) -> LayerTransfer:
    """Return a `LayerTransfer` of one layer without source and target, to name the layer in calls of `Compute`."""
    return LayerTransfer("", "", layer, layer + 1, state_bytes(scenario, layer, layer + 1))


@dataclass(frozen=True, slots=True)
class FirstState:
    """The state of layers before a run's first step, as initialised or from a checkpoint.

    Attributes:
        rows: Yields the states of layers that this rank has not trained, each a one-dimensional uint8 tensor.
        outer: Returns the state of a layer's outer step; empty if there is none.
    """

    step: int
    rows: Callable[[Sequence[int]], Iterator[torch.Tensor]]
    outer: Callable[[int], LayerTensors] = lambda layer: {}


def first_state(
    run: RunConfig, scenario: Scenario, compute: Compute, model: tuple[str, ...], pipeline: int
) -> FirstState:
    """Return a pipeline's state before the run's first step.

    Raises:
        InputError: The checkpoint with this state is damaged.
    """
    if not isinstance(compute, RealCompute):
        return FirstState(0, lambda layers: map(compute.layer_state, (one_layer(scenario, each) for each in layers)))
    if not run.first_step:
        return FirstState(0, compute.first_states)
    every = CheckpointFolder(Path(run.checkpoints)).of_step(run.first_step, model)
    found = every.of_pipeline(pipeline)
    # A worker that was away goes on with the optimizer's state of another one.
    source = found if found.has_state else every.with_state[0][1]

    def rows(layers: Sequence[int]) -> Iterator[torch.Tensor]:
        return (compute.packed_state(layer, source.tensors(layer)) for layer in layers)

    return FirstState(run.first_step, rows, (found if run.decoupled else source).outer)


class StateBackups:
    """Makes, keeps and restores the copies of one rank, over all sessions.

    Args:
        interval_steps: Number of steps between two copies.
        source: The state before the run's first step, for layers that this rank has not trained.
    """

    def __init__(
        self,
        device: str,
        interval_steps: int,
        scenario: Scenario,
        compute: Compute,
        clock: RunClock,
        source: FirstState,
    ) -> None:
        self._clock = clock
        self._device = device
        self._interval_steps = interval_steps
        self._scenario = scenario
        self._compute = compute
        self._layers = range(len(scenario.model.layers))
        self._copies: dict[int, dict[int, torch.Tensor]] = {}
        # The outer states of layers that this rank exchanges with other pipelines, by step.
        self._outer: dict[int, Mapping[int, LayerTensors]] = {}
        self._source = source
        self._untouched = set(self._layers)
        self._own: frozenset[int] = frozenset()
        self._awaited: dict[int, int] = {}
        self._begun: list[int] = []
        self._rests = False
        self._lock = threading.Lock()

    def begin_session(self, step: int, durable: int) -> None:
        """Forget copies that are incomplete, older than ``durable``, or newer than ``step``.

        Args:
            step: The first step of the session; some layers may have only one copy before this step.
            durable: The newest step before which copies are known to be complete.
        """
        with self._lock:
            self._keep_copies(range(durable, step + 1))
            self._awaited.clear()
            self._begun.clear()

    def assign(self, plan: Plan) -> None:
        """Mark the layers of this rank under a plan as trained, so that `source` no longer has their state."""
        self._untouched -= layers_of(plan, self._device)

    def begin_step(
        self,
        step: int,
        plan: Plan,
        durable: int,
        *,
        anew: bool,
        transport: Transport,
        rows: EventRecorder,
        outer: OuterStates,
    ) -> None:
        """Copy this rank's layers before a step if a copy is due, by the same rule on all ranks of the step's plan.

        ``durable`` is the newest step before which copies were complete when the plan was decided. With ``anew`` layers
        have changed devices before the step, so that a copy is due. ``transport`` carries copies for backup ranks, and
        ``rows`` records when they were sent. ``outer`` returns the outer states before the step.
        """
        self._own = layers_of(plan, self._device)
        self.assign(plan)
        moves = self._moves_due(step, plan, durable, anew=anew)
        if moves is None:
            return
        self.copy(step, outer)
        for number, move in enumerate(moves):
            if move.target == self._device:
                sizes = [self._compute.state_bytes(one_layer(self._scenario, layer)) for layer in move.layers]
                arrived = self._arrival(rows, step, move, sizes)
                transport.post(move.source, backup_tag(step, number), sum(sizes), arrived)
            if move.source == self._device:
                state, start_s = self.state(step, move), self._clock.now_s()
                departed = partial(self._sent, rows, step, move, state.numel(), start_s)
                transport.send(move.target, backup_tag(step, number), state, start_s, departed)

    def copy(self, step: int, outer: OuterStates) -> None:
        """Copy the present state of this rank's layers, which is that before ``step``, with their outer states."""
        outer_states = outer(step)
        states = {layer: self._compute.layer_state(one_layer(self._scenario, layer)) for layer in self._own}
        with self._lock:
            self._copies.setdefault(step, {}).update(states)
            self._outer[step] = outer_states

    def rest(self, step: int, plan: Plan, durable: int, *, anew: bool) -> None:
        """Note which copies the other ranks begin before a step that does not use this rank; see `begin_step`.

        Otherwise it would begin others than they do when it has a part again, and wait for them for ever.
        """
        self._own = frozenset()
        self._moves_due(step, plan, durable, anew=anew)

    def _moves_due(self, step: int, plan: Plan, durable: int, *, anew: bool) -> Sequence[LayerTransfer] | None:
        """Return the transfers of the copy that begins before a step; None if no copy begins."""
        with self._lock:
            self._rests = not self._own
            self._keep_copies(range(durable, step + 1))
            self._begun = [each for each in self._begun if each >= durable]
            self._awaited = {each: count for each, count in self._awaited.items() if each >= durable}
            under_way = sum(each > durable for each in self._begun)
            is_due = anew or step % self._interval_steps == 0
            if not is_due or step in self._begun or under_way >= MOST_INCOMPLETE_BACKUPS:
                return None
            moves = backup_moves(plan, self._scenario)
            self._begun.append(step)
            self._awaited[step] = sum(move.target == self._device for move in moves)
            return moves

    @property
    def kept(self) -> int | None:
        """The newest step up to which this rank's copies are complete; None while the rank makes none."""
        with self._lock:
            if self._rests:
                return None
            complete = takewhile(lambda step: not self._awaited[step], self._begun)
            return max(complete, default=self._source.step)

    def copies(self) -> Copies:
        """Return the layers of which this rank has copies, by the step before which they were made."""
        with self._lock:
            found = {step: frozenset(layers) for step, layers in self._copies.items()}
        first = self._source.step
        return {**found, first: found.get(first, frozenset()) | frozenset(self._untouched)}

    def state(self, step: int, move: LayerTransfer) -> torch.Tensor:
        """Return the state of the layers of ``move`` before ``step``: a one-dimensional uint8 tensor."""
        return torch.cat(list(self._states(step, move.layers)))

    def outer_states(self, step: int, layers: Iterable[int]) -> dict[int, LayerTensors]:
        """Return the outer states of those of the layers of which this rank has them before ``step``."""
        with self._lock:
            found = self._outer.get(step)
        if found is None and step == self._source.step:
            found = {layer: outer for layer in layers if (outer := self._source.outer(layer))}
        return {layer: found[layer] for layer in layers if layer in found} if found else {}

    def restore(self, step: int, plan: Plan) -> None:
        """Restore this rank's layers under ``plan`` from its own copies before ``step``, as far as it has them."""
        there = self.copies().get(step, frozenset())
        layers = sorted(layers_of(plan, self._device) & there)
        for layer, state in zip(layers, self._states(step, layers), strict=True):
            self._compute.put_layer_state(one_layer(self._scenario, layer), state)

    def _states(self, step: int, layers: Sequence[int]) -> Iterator[torch.Tensor]:
        with self._lock:
            copies = self._copies.get(step, {})
            found = {layer: copies[layer] for layer in layers if layer in copies}
        missing = [layer for layer in layers if layer not in found]
        assert not missing or step == self._source.step, (step, missing)
        assert self._untouched.issuperset(missing), missing
        first = self._source.rows(missing) if missing else iter(())
        for layer in layers:
            yield found[layer] if layer in found else next(first)

    def _keep_copies(self, steps: range) -> None:
        """Forget the copies before all other steps."""
        self._copies = {step: layers for step, layers in self._copies.items() if step in steps}
        self._outer = {step: layers for step, layers in self._outer.items() if step in steps}

    def _sent(
        self, rows: EventRecorder, step: int, move: LayerTransfer, size_bytes: int, start_s: float, end_s: float
    ) -> None:
        place = (move.source, move.target, -1, -1, -1, step, BACKUP_ACTION)
        rows.log(Event(EventKind.BACKUP, *place, start_s, end_s, size_bytes))

    def _arrival(
        self, rows: EventRecorder, step: int, move: LayerTransfer, sizes: Sequence[int]
    ) -> Callable[[RecvHandle], None]:
        def arrived(handle: RecvHandle) -> None:
            if handle.lost:
                return
            # A row of zero length tells the arrival for the row of the sender.
            place = (move.target, move.source, -1, -1, -1, step, BACKUP_ACTION)
            rows.log(Event(EventKind.RECEIVE, *place, handle.arrived_s, handle.arrived_s, handle.size_bytes))
            parts = dict(zip(move.layers, handle.wait().split_with_sizes(list(sizes)), strict=True))
            with self._lock:
                if step in self._awaited:
                    self._copies[step].update(parts)
                    self._awaited[step] -= 1

        return arrived
