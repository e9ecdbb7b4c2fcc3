"""Copies of the layers' state at some steps: what a run goes on from when ranks are lost.

Every few steps each rank copies the state of its layers, and layers that nobody else has are sent to a backup too
(planner/adapt/migration.py). When all have all of it, which ranks hear with a plan, older copies are dropped. At most
`_UNDER_WAY` copies are on their way at a time: where links are slow, some are left out.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from executor.core.job import RunConfig
from executor.recovery.checkpoints import CheckpointFolder
from executor.training.real_compute import Compute
from executor.transport.receive import RecvHandle
from executor.transport.transport import Transport
from executor.transport.wire_format import backup_tag
from planner.adapt.migration import LayerTransfer, Migration, backup_moves, moves_from, state_bytes
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario

# Step to the layers whose state before that step a device has.
Copies = Mapping[int, frozenset[int]]


def newest_complete(copies: Iterable[Copies], layers: int, latest: int) -> int | None:
    """Return the newest step before which the state of all layers is there, on whichever devices.

    Returns:
        The step; None if there is none.
    """
    found = list(copies)
    for step in sorted({step for each in found for step in each if step <= latest}, reverse=True):
        if frozenset().union(*(each.get(step, frozenset()) for each in found)) >= frozenset(range(layers)):
            return step
    return None


def missing_layers(copies: Iterable[Copies], layers: int, latest: int) -> list[int]:
    """Return the layers that nobody has from the newest step, ``latest`` at most, of which some are left."""
    found = list(copies)
    newest = max((step for each in found for step in each if step <= latest), default=0)
    there = frozenset().union(*(each.get(newest, frozenset()) for each in found))
    return sorted(set(range(layers)) - there)


def restoring_moves(plan: Plan, scenario: Scenario, step: int, copies: Mapping[str, Copies]) -> Migration:
    """Return what the devices of a plan need of each other to have its layers as they were before a step."""
    return moves_from({device: each.get(step, frozenset()) for device, each in copies.items()}, plan, scenario)


def layers_of(plan: Plan, device: str) -> frozenset[int]:
    """Return the layers that a device trains under a plan."""
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    return frozenset(
        layer
        for stage in stages
        if any(device in replica.devices for replica in stage.replicas)
        for layer in stage.layers
    )


def one_layer(scenario: Scenario, layer: int) -> LayerTransfer:
    """Return a move that stands for a layer where it is."""
    return LayerTransfer("", "", layer, layer + 1, state_bytes(scenario, layer, layer + 1))


@dataclass(frozen=True, slots=True)
class FirstState:
    """The state of layers before a run's first step: as the model was built, or as a checkpoint has it.

    Attributes:
        step: The first step of the run.
        row: Returns the state of a layer that was never trained here, uint8, one-dimensional.
    """

    step: int
    row: Callable[[int], torch.Tensor]


def first_state(run: RunConfig, scenario: Scenario, compute: Compute, model: tuple[str, ...]) -> FirstState:
    """Return what a run begins with.

    Raises:
        InputError: It begins with a checkpoint that is not whole.
    """
    if not run.first_step:
        return FirstState(0, lambda layer: compute.layer_state(one_layer(scenario, layer)))
    return FirstState(run.first_step, CheckpointFolder(Path(run.checkpoints)).of_step(run.first_step, model).row)


# Copies that not all ranks are known to have.
_UNDER_WAY = 2


class StateBackups:
    """The copies of one rank, over all sessions.

    Args:
        interval_steps: Steps from one copy to the next.
        source: Where layers that were never trained here are as they were before the run's first step: as the model
            was built, or as a checkpoint has them.
    """

    def __init__(
        self, device: str, interval_steps: int, scenario: Scenario, compute: Compute, source: FirstState
    ) -> None:
        self._device = device
        self._interval_steps = interval_steps
        self._scenario = scenario
        self._compute = compute
        self._layers = range(len(scenario.model.layers))
        self._copies: dict[int, dict[int, torch.Tensor]] = {}
        self._source = source
        self._untouched = set(self._layers)
        self._own: frozenset[int] = frozenset()
        self._awaited: dict[int, int] = {}
        self._begun: list[int] = []
        self._rests = False
        self._lock = threading.Lock()

    def begin_session(self, step: int, durable: int) -> None:
        """Forget what is on its way, and the copies that are not needed any more or come too late.

        Args:
            step: The step before which all ranks go on; of some layers there may be one copy only.
            durable: The step whose copies all ranks were known to have.
        """
        with self._lock:
            self._copies = {each: layers for each, layers in self._copies.items() if durable <= each <= step}
            self._awaited.clear()
            self._begun.clear()

    def assign(self, plan: Plan) -> None:
        """Note that this rank trains the layers that it has under a plan: they are not as they were built."""
        self._untouched -= layers_of(plan, self._device)

    def begin_step(self, step: int, plan: Plan, durable: int, *, anew: bool, transport: Transport) -> None:
        """Copy the layers as they are before a step, if it is time; all ranks of the plan come to the same answer.

        Args:
            step: Number of the step.
            plan: The plan of the step.
            durable: The step whose copies all ranks were known to have when this step was decided on.
            anew: Whether layers have changed devices before it.
            transport: Carries what goes to backups.
        """
        self._own = layers_of(plan, self._device)
        self.assign(plan)
        with self._lock:
            self._rests = False
            self._copies = {each: layers for each, layers in self._copies.items() if each >= durable}
            self._begun = [each for each in self._begun if each >= durable]
            self._awaited = {each: count for each, count in self._awaited.items() if each >= durable}
            under_way = sum(each > durable for each in self._begun)
            if not (anew or step % self._interval_steps == 0) or step in self._begun or under_way >= _UNDER_WAY:
                return
        moves = backup_moves(plan, self._scenario)
        with self._lock:
            self._begun.append(step)
            self._awaited[step] = sum(move.target == self._device for move in moves)
        self.copy(step)
        for number, move in enumerate(moves):
            if move.target == self._device:
                sizes = [self._compute.state_bytes(one_layer(self._scenario, layer)) for layer in move.layers]
                arrived = self._arrival(step, move, sizes)
                transport.post(move.source, backup_tag(step, number), sum(sizes), arrived)
            if move.source == self._device:
                transport.send(move.target, backup_tag(step, number), self.state(step, move), float("-inf"))

    def copy(self, step: int) -> None:
        """Copy the layers of this rank as they are now, before ``step``."""
        states = {layer: self._compute.layer_state(one_layer(self._scenario, layer)) for layer in self._own}
        with self._lock:
            self._copies.setdefault(step, {}).update(states)

    def rest(self) -> None:
        """Note that this rank has no part in the steps to come: it has nothing to keep."""
        self._own = frozenset()
        with self._lock:
            self._rests = True

    @property
    def kept(self) -> int | None:
        """The latest step whose copies are complete here, as are those before; None where there is nothing to keep."""
        with self._lock:
            if self._rests:
                return None
            complete = takewhile(lambda step: not self._awaited[step], self._begun)
            return max(complete, default=self._source.step)

    def copies(self) -> Copies:
        """Return the layers of which this rank has the state before some step, by that step."""
        with self._lock:
            found = {step: frozenset(layers) for step, layers in self._copies.items()}
        first = self._source.step
        return {**found, first: found.get(first, frozenset()) | frozenset(self._untouched)}

    def state(self, step: int, move: LayerTransfer) -> torch.Tensor:
        """Return the copy of the layers of ``move`` as they were before ``step``."""
        return torch.cat([self._state_of(step, layer) for layer in move.layers])

    def restore(self, step: int, plan: Plan) -> None:
        """Put those copies back that this rank has of the layers that it holds under ``plan``."""
        there = self.copies().get(step, frozenset())
        for layer in sorted(layers_of(plan, self._device) & there):
            self._compute.put_layer_state(one_layer(self._scenario, layer), self._state_of(step, layer))

    def _state_of(self, step: int, layer: int) -> torch.Tensor:
        with self._lock:
            copy = self._copies.get(step, {}).get(layer)
        if copy is None:
            assert step == self._source.step, (step, layer)
            assert layer in self._untouched, layer
            return self._source.row(layer)
        return copy

    def _arrival(self, step: int, move: LayerTransfer, sizes: Sequence[int]) -> Callable[[RecvHandle], None]:
        def arrived(handle: RecvHandle) -> None:
            if handle.lost:
                return
            parts = dict(zip(move.layers, handle.wait().split_with_sizes(list(sizes)), strict=True))
            with self._lock:
                if step in self._awaited:
                    self._copies[step].update(parts)
                    self._awaited[step] -= 1

        return arrived
