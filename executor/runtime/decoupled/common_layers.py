"""The common parameters of layers at a syncer: pseudo-gradients arrive, and outer steps merge those that are there.

The rules are those of `planner.plan.outer_rounds`, which the simulator follows too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch

from executor.recovery.checkpoint_file import LayerTensors
from executor.runtime.outer.state import NoOuterState, OuterState
from planner.plan.outer_rounds import Contribution, Rounds, merging_weights, share_of_workers
from planner.plan.outer_step import OuterStep

# Names of the tensors of `CommonLayers.tensors` beside those of `OuterState`: the version, the last step of each worker
# in it, the version that this led to with the samples in it, and of each worker what waits for an outer step, its
# values and its `Contribution`.
_VERSION, _MERGED, _LATEST, _VALUES, _FACTS = "version", "merged", "latest", "values", "facts"


@dataclass(frozen=True, slots=True)
class Sent:
    """A message with pseudo-gradients.

    Attributes:
        layers: What the syncer must know of each layer's.
        payload: The pseudo-gradients of these layers in rising order, packed, a one-dimensional uint8 tensor.
    """

    layers: Mapping[int, Contribution]
    payload: torch.Tensor

    @property
    def step(self) -> int:
        """The worker's step after which it was sent."""
        return next(iter(self.layers.values())).step


@dataclass(frozen=True, slots=True)
class News:
    """A message with common parameters.

    Attributes:
        versions: By layer its version, and the last step of the receiving worker whose pseudo-gradient is in it.
        payload: The parameters of these layers in rising order, a one-dimensional uint8 tensor.
        arrived_s: Run second of the arrival; minus infinity before.
        snapshot: The last checkpoint for which the syncer had copied its state before; -1 if there is none.
    """

    versions: Mapping[int, tuple[int, int]]
    payload: torch.Tensor
    arrived_s: float = -inf
    snapshot: int = -1

    @property
    def newest(self) -> int:
        """The highest version in it."""
        return max(version for version, _ in self.versions.values())


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for the state of layers, by a device of a worker that joins."""

    device: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class States:
    """A message with the state of layers, for a device of a worker that joins.

    Attributes:
        payload: The state as `executor.training.compute.Compute.layer_state` returns it, of one layer after the other;
            empty if nobody gives it.
        arrived_s: Run second of the arrival; minus infinity before.
    """

    layers: tuple[int, ...]
    payload: torch.Tensor
    arrived_s: float = -inf


@dataclass(frozen=True, slots=True)
class Merged:
    """What an outer step has merged of one message.

    Attributes:
        source: Name of the sending device.
        step: The worker's step after which it was sent.
        arrived_s: Run second of its arrival.
        size_bytes: Bytes of the layers that were merged.
        missed: Number of outer steps that the pseudo-gradients did not know.
    """

    source: str
    step: int
    arrived_s: float
    size_bytes: int
    missed: int


@dataclass(frozen=True, slots=True)
class _There:
    """A pseudo-gradient that waits for an outer step."""

    packed: torch.Tensor
    source: str
    arrived_s: float


class CommonLayers:
    """The layers of one syncer.

    Args:
        samples: Samples of a step of each worker.
        elements: Number of parameters of each layer.
        state: The common parameters and the outer momentum.
        restored: What `tensors` has returned in an earlier run, by layer.
        names: A name of each worker, for what is merged of an earlier run.
    """

    def __init__(
        self,
        settings: OuterStep,
        samples: Sequence[int],
        elements: Mapping[int, int],
        state: OuterState | NoOuterState,
        restored: Mapping[int, LayerTensors],
        names: Sequence[str] = (),
    ) -> None:
        self._settings = settings
        self._samples = dict(enumerate(samples))
        self._elements = elements
        self._state = state
        self._there: dict[tuple[int, int], _There] = {}
        self._merged_step: dict[tuple[int, int], int] = {}
        # By layer and worker: the version that the last pseudo-gradient merged led to, and the samples in it.
        self._latest: dict[int, dict[int, tuple[int, int]]] = {layer: {} for layer in elements}
        self._rounds: dict[int, Rounds] = {}
        for layer in elements:
            found = restored.get(layer, {})
            version = int(found[_VERSION]) if _VERSION in found else 0
            rounds = self._rounds[layer] = Rounds(len(samples), settings, version)
            # The plan may have had more workers.
            for worker, step in enumerate(found[_MERGED].tolist()[: len(samples)] if _MERGED in found else ()):
                if step >= 0:
                    self._merged_step[layer, worker] = step
                    # Checkpoints of version 0.1 lack it.
                    led_to, merged = found[_LATEST][worker].tolist() if _LATEST in found else (0, 0)
                    self._latest[layer][worker] = (led_to, merged)
                if f"{_VALUES}{worker}" in found:
                    self._there[layer, worker] = _There(found[f"{_VALUES}{worker}"], names[worker], 0.0)
                    rounds.arrive(Contribution(worker, *found[f"{_FACTS}{worker}"].tolist()), 0.0)

    @property
    def layers(self) -> Sequence[int]:
        """The indices of the layers, in rising order."""
        return sorted(self._elements)

    @property
    def due_s(self) -> float:
        """Run second at which the next outer step is due; infinity if this is not known."""
        return min((rounds.due_s for rounds in self._rounds.values()), default=inf)

    def arrive(self, source: str, sent: Sent, now_s: float) -> None:
        """Note the pseudo-gradients that a device has sent."""
        for layer, packed in zip(sent.layers, torch.split(sent.payload, self._sizes(sent.layers)), strict=True):
            contribution = sent.layers[layer]
            self._there[layer, contribution.worker] = _There(packed, source, now_s)
            self._rounds[layer].arrive(contribution, now_s)

    def lose(self, worker: int, layers: Iterable[int], now_s: float) -> None:
        """Await a worker no longer for some layers, since the device that has them was lost."""
        for layer in layers:
            self._rounds[layer].lose(worker, now_s)

    def rejoin(self, worker: int, layers: Iterable[int]) -> None:
        """Await a worker again for some layers."""
        for layer in layers:
            self._rounds[layer].rejoin(worker)

    def take_outer_steps(self, until_s: float) -> tuple[list[int], list[Merged]]:
        """Take the outer steps that are due by ``until_s``; with infinity, with all that are there.

        Returns:
            The layers whose common parameters have changed, and what of each message was merged.
        """
        layers = [layer for layer, rounds in self._rounds.items() if rounds.there and (rounds.due_s <= until_s)]
        messages: dict[tuple[str, int], list[tuple[int, int, float]]] = {}
        for layer in layers:
            rounds = self._rounds[layer]
            before, contributions = rounds.version, rounds.take()
            weights = merging_weights(contributions, self._samples)
            found = {each.worker: self._there.pop((layer, each.worker)) for each in contributions}
            packed = {worker: each.packed for worker, each in found.items()}
            by_worker = {each.worker: weight for each, weight in zip(contributions, weights, strict=True)}
            self._state.average(layer, packed, by_worker)
            counts = {each.worker: each.steps * self._samples[each.worker] for each in contributions}
            self._state.advance(layer, share_of_workers(counts, self._latest[layer]))
            self._latest[layer] |= {worker: (rounds.version, count) for worker, count in counts.items()}
            for each in contributions:
                self._merged_step[layer, each.worker] = each.step
                there = found[each.worker]
                key = (there.source, each.step)
                messages.setdefault(key, []).append((layer, before - each.base, there.arrived_s))
        merged = [
            Merged(
                source,
                step,
                max(arrived_s for _, _, arrived_s in parts),
                sum(self._sizes(layer for layer, _, _ in parts)),
                max(missed for _, missed, _ in parts),
            )
            for (source, step), parts in messages.items()
        ]
        return layers, merged

    def news(self, layers: Iterable[int], worker: int) -> News:
        """Return the message with the newest versions of some layers for a worker."""
        chosen = sorted(layers)
        versions = {
            layer: (self._rounds[layer].version, self._merged_step.get((layer, worker), -1)) for layer in chosen
        }
        values = torch.cat([self._state.common(layer) for layer in chosen])
        return News(versions, values.view(torch.uint8))

    def version(self, layer: int) -> int:
        """Return the number of outer steps that a layer has had."""
        return self._rounds[layer].version

    def tensors(self, layer: int) -> LayerTensors:
        """Return a copy of the state of a layer, for a checkpoint."""
        rounds, merged = self._rounds[layer], [self._merged_step.get((layer, each), -1) for each in self._samples]
        found = dict(self._state.tensors(layer))
        latest = torch.tensor([self._latest[layer].get(each, (0, 0)) for each in self._samples])
        found |= {_VERSION: torch.tensor([rounds.version]), _MERGED: torch.tensor(merged), _LATEST: latest}
        for worker, each in rounds.there.items():
            found[f"{_VALUES}{worker}"] = self._there[layer, worker].packed.clone()
            found[f"{_FACTS}{worker}"] = torch.tensor([each.step, each.steps, each.base])
        return found

    def add_sent(self, found: dict[int, LayerTensors], sent: Sent) -> None:
        """Add pseudo-gradients, which were on the way to the syncer, to what `tensors` has returned before."""
        for layer, packed in zip(sent.layers, torch.split(sent.payload, self._sizes(sent.layers)), strict=True):
            each = sent.layers[layer]
            facts = torch.tensor([each.step, each.steps, each.base])
            more = {f"{_VALUES}{each.worker}": packed.clone(), f"{_FACTS}{each.worker}": facts}
            found[layer] = {**found[layer], **more}

    def parameters(self, layer: int) -> torch.Tensor:
        """Return the common parameters of a layer."""
        return self._state.common(layer)

    def _sizes(self, layers: Iterable[int]) -> list[int]:
        return [self._settings.packed_bytes(self._elements[layer]) for layer in layers]
