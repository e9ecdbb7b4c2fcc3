"""How long each layer of a stage takes on a device: forward, both gradients, update.

The layers take turns, as they do in a step: one that is repeated by itself finds its weights in the caches, and memory
that it has just let go.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from executor.core.job import JobFolder
from executor.rank.control_client import ControlStore
from executor.rank.worker import join_job
from executor.training.device import CPU, compute_device, from_payloads, settle, threads_of_a_rank, to_payload
from executor.training.models.loading import LoadedModel, SampleShape, load_with_sizes
from executor.training.models.trainable import DataOrder
from executor.training.optimizer import UpdateRule
from executor.training.stage_module import Loss, StageModule
from executor.transport.rendezvous import connect
from planner.scenario.training import Training

_MICROBATCH = 0

# Of the order of what a stage waits for another one.
WAIT_S = 0.001

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, for one microbatch; means.

    Attributes:
        layer: Index in the model.
        samples: In the microbatch.
        forward_s: With the making of the data where the layer is the first or, for the targets, the last one; at the
            ends of a stage, as the gradients, with the copies between the device and the CPU.
        backward_s: Both gradients in one.
        backward_input_s: That of the input, where backward is split.
        backward_weight_s: Those of the weights, where backward is split.
        update_s: Of the optimizer, once a step.
    """

    layer: int
    samples: int
    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    update_s: float


@dataclass(frozen=True, slots=True)
class PassOverhead:
    """What a forward and a backward take where there is nothing to compute: it comes on top once for each stage.

    Attributes:
        forward_s: Seconds; every layer's time has it.
        backward_s: The same of a whole backward, and of that of the input.
    """

    forward_s: float
    backward_s: float


def measure_layers(
    loaded: LoadedModel,
    layers: Sequence[int],
    samples: int,
    training: Training,
    repeats: int,
    device: torch.device = CPU,
    wait_s: float = WAIT_S,
) -> list[LayerTimes]:
    """Return the times of the layers of a stage.

    Args:
        loaded: The model; its layers are moved to the device, and keep their parameters.
        layers: Consecutive. The first one receives from the stage before it, if there is one, the last one sends.
        samples: Of a microbatch.
        training: The update rule, the precision, and the global batch.
        repeats: How often each time is taken.
        device: Where the layers are computed.
        wait_s: Before each pass: stages wait for each other, and a core that has idled is slower for some milliseconds.
    """
    ends = (layers[0], layers[-1]) if layers else (0, 0)
    works = [_StageLayer(loaded, layer, ends, samples, training, device) for layer in layers]
    for splits in (False, True):
        for work in works:
            work.module.start_step(recompute=False, splits=splits)
        for _ in range(repeats):
            time.sleep(wait_s)
            _forward(works)
            time.sleep(wait_s)
            _backward(works, splits)
    for work in works:
        work.module.start_step(recompute=False, splits=False)
        work.rule.clear_gradients()
    return [work.times() for work in works]


def measure_overhead(training: Training, repeats: int, device: torch.device = CPU) -> PassOverhead:
    """Return what is in every layer's time once, and in a stage's once as well; medians."""
    module = StageModule([nn.Identity()], device, training.precision, copies_inputs=False)
    module.start_step(recompute=False, splits=False)
    number = torch.zeros(1, 1, device=device)
    forward_s, backward_s = [], []
    for _ in range(repeats):
        forward_s.append(_seconds(lambda: module.forward(_MICROBATCH, number.detach().requires_grad_()), device)[0])
        backward_s.append(_seconds(lambda: module.backward(_MICROBATCH, number), device)[0])
    return PassOverhead(median(forward_s), median(backward_s))


def _forward(works: Sequence["_StageLayer"]) -> None:
    passed: torch.Tensor | None = None
    for work in works:
        passed = work.timed("forward_s", partial(work.forward, passed))


def _backward(works: Sequence["_StageLayer"], splits: bool) -> None:
    gradient: torch.Tensor | None = None
    for work in reversed(works):
        name, run = ("backward_input_s", work.module.backward_input) if splits else ("backward_s", work.module.backward)
        gradient = work.timed(name, partial(work.backward, run, gradient))
    for work in reversed(works):
        if splits:
            work.timed("backward_weight_s", partial(work.module.backward_weight, _MICROBATCH))
        else:
            work.timed("update_s", partial(work.rule.update, 0, 0.0))


class _StageLayer:
    """A layer and what `executor.training.real_compute` does around it, for one microbatch."""

    def __init__(
        self,
        loaded: LoadedModel,
        layer: int,
        ends: tuple[int, int],
        samples: int,
        training: Training,
        device: torch.device,
    ) -> None:
        sizes = loaded.sizes
        self.layer, self.samples, self.device = layer, samples, device
        self._model, self._data = loaded.model, DataOrder(loaded.model, training.global_batch, training.seed)
        self._is_first, self._is_last = layer == 0, layer == len(sizes) - 1
        self._receives, self._sends = layer == ends[0], layer == ends[1]
        self.module = StageModule(
            [loaded.model.layers[layer]], device, training.precision, copies_inputs=sizes[layer].changes_inputs
        )
        # Gradients add up over all repeats: steps along them would take the parameters out of the numbers' range.
        still = replace(training, optimizer=replace(training.optimizer, learning_rate=0.0))
        self.rule = UpdateRule(list(loaded.model.layers[layer].parameters()), still)
        self._entering = _Noise(sizes[layer - 1].output, samples, device) if self._receives and layer else None
        self._leaving = _Noise(sizes[layer].output, samples, device) if self._sends and not self._is_last else None
        self._taken: dict[str, list[float]] = {}

    def timed(self, name: str, work: Callable[[], Result]) -> Result:
        """Do some work, and remember under a name how long it took."""
        seconds, result = _seconds(work, self.device)
        self._taken.setdefault(name, []).append(seconds)
        return result

    def times(self) -> LayerTimes:
        """Return the means of what was timed.

        Times have a tail: medians of layers add up to less than a step takes, which has many of them. And where a host
        may use part of a core only, the passes in which it has to stand still are what tells.
        """
        return LayerTimes(self.layer, self.samples, **{name: fmean(values) for name, values in self._taken.items()})

    def forward(self, entering: torch.Tensor | None) -> torch.Tensor:
        """Run the layer forward, from the data, the layer or the payload before it to the loss or what comes after."""
        loss: Loss | None = None
        if self._is_first or self._is_last:
            inputs, targets = self._data.samples(0, 0, self.samples)
        if self._is_last:
            aims = targets.to(self.device)
            loss = lambda outputs: self._model.loss(outputs, aims)  # noqa: E731
        if self._is_first:
            begin = inputs.to(self.device)
        else:
            passed = self._entering.arrive() if self._entering is not None else entering
            assert passed is not None, "the layer before has put something out"
            begin = passed.detach().requires_grad_()
        outputs = self.module.forward(_MICROBATCH, begin, loss)
        if self._leaving is not None:
            to_payload(outputs)
        return outputs

    def backward(
        self, run: Callable[[int, torch.Tensor | None], torch.Tensor | None], gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run a method of the module backward, from the payload or layer after it to the one before it."""
        found = run(_MICROBATCH, self._leaving.arrive() if self._leaving is not None else gradient)
        if self._receives and found is not None:
            to_payload(found)
        return found


class _Noise:
    """What a stage beside puts out: a payload that has arrived on the CPU."""

    def __init__(self, shape: SampleShape, samples: int, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._payload = to_payload(torch.randn(samples, *shape.sizes, dtype=shape.dtype)).clone()

    def arrive(self) -> torch.Tensor:
        return from_payloads([self._payload], self._shape.sizes, self._shape.dtype, self._device)


def _seconds(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    settle(device)
    start_s = time.perf_counter()
    result = work()
    settle(device)
    return time.perf_counter() - start_s, result


REPEATS = 15
_PATIENCE = timedelta(minutes=10)


def main(agent: str, folder: str) -> None:
    """Measure this rank's layers with each size of its microbatches."""
    client = join_job(agent, folder)
    job, rank = JobFolder(Path(folder)), client.rank
    scenario, plan, _ = job.read()
    torch.set_num_threads(threads_of_a_rank(len(plan.devices)))
    connect(ControlStore(client), rank, len(plan.devices), "profile")
    assert scenario.code is not None, "there is something to measure"
    loaded = load_with_sizes(scenario.code, scenario.training.seed)
    device = plan.devices[rank]
    where = compute_device(scenario.cluster.by_name[device].kind, "real")
    measured = []
    # Together, so that each measures while the others compute, as they will.
    dist.barrier(timeout=_PATIENCE)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica, samples in zip(stage.replicas, stage.most_samples(pipeline.microbatches), strict=True):
                if replica.device == device:
                    layers = stage.layers
                    measured += measure_layers(loaded, layers, samples, scenario.training, REPEATS, where)
    dist.barrier(timeout=_PATIENCE)
    (job.path / f"layers-{rank}.json").write_text(json.dumps([asdict(each) for each in measured]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
