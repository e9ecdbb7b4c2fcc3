"""Measures the times of each layer of a stage: forward, backward in one part and in two, and the optimizer's update.

The layers are measured in turn, as in a training step: if one layer were repeated alone, its weights would be in the
processor's caches already. Their sum is longer than the stage, by 5 to 8 % for a small convolutional model on a CPU:
the gradient between two layers that run apart is stored once more. So passes through the whole stage alternate with
passes layer by layer; the first give the sum of the layers' times, the second its division among them.

`main` runs one rank of a job, in which all ranks measure the layers of their stages at the same time. The rank writes
``layers-RANK.json`` to the job's folder.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from executor.core.clock import RunClock
from executor.core.failures import give_up
from executor.core.job import JobFolder
from executor.core.step_program import compile_plan
from executor.profiling.boundary_messages import Boundary, BoundaryMessages, Pauses, has_one_stage
from executor.rank.control_client import ControlStore
from executor.rank.worker import join_job
from executor.training.data.order import DataOrder
from executor.training.device import CPU, compute_device, from_payloads, synchronize, threads_of_a_rank, to_payload
from executor.training.models.loading import LoadedModel, SampleShape, load_with_sizes
from executor.training.models.precision import shared_copies
from executor.training.optimizer import UpdateRule
from executor.training.stage_module import Loss, StageModule
from executor.transport.rendezvous import ProcessGroups, connect
from executor.transport.transport import Transport
from planner.plan.actions import Kind
from planner.scenario.training import Training

# Least number of measurements of each time if this module runs as a program, and about the least seconds for which it
# measures each kind of backward.
REPEATS = 15
LEAST_S = 4.0

# Timeout of a barrier.
_TIMEOUT = timedelta(minutes=10)

_MICROBATCH = 0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Mean times of one layer for one microbatch of ``samples`` samples; the update happens once per step.

    ``backward_s`` is the time of an unsplit backward; in a split one ``backward_input_s`` is that of the input
    gradient, and ``backward_weight_s`` that of the weight gradients. The layers of a stage together take as long as the
    stage. The forward of the model's first and last layer
    includes the reading of data or targets, unless other processes read them ahead. Times at the ends of a stage
    include copies between the device and the CPU.
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
    """Time of a pass through a stage without layers; the times of the layers of a stage together include it once.

    ``backward_s`` also is the overhead of the input gradient in a split backward.
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
    boundary: Boundary | None = None,
    least_s: float = 0.0,
) -> list[LayerTimes]:
    """Return the times of the layers of a stage, after two passes that are not measured.

    Args:
        loaded: The model as loaded; its layers are moved to the device, and keep their parameters.
        layers: Indices of consecutive layers, which form a stage.
        samples: Number of samples in a microbatch.
        training: The optimizer, the precision and the global batch.
        repeats: Least number of measurements of each time.
        device: The device that computes the layers.
        boundary: What happens before and after each pass; by default `Pauses`.
        least_s: About the least time for which unsplit backwards are measured, and as long for split ones, seconds.
    """
    boundary = boundary or Pauses()
    if not layers:
        return []
    ends = (layers[0], layers[-1])
    parts = [_StagePart(loaded, [layer], ends, samples, training, device) for layer in layers]
    whole = [_StagePart(loaded, layers, ends, samples, training, device)]
    for splits in (False, True):
        with shared_copies():
            for each in (*parts, *whole):
                # In the first pass torch chooses its algorithms, and memory is allocated.
                each.records = False
            _pass(parts, splits, Pauses())
            last_s, _ = _seconds(lambda: _pass(parts, splits, Pauses()), device)  # noqa: B023
            for each in parts:
                whole[0].rule.adopt(each.rule)
            _pass(whole, splits, Pauses())
            for each in (*parts, *whole):
                each.records = True
            for number in range(boundary.passes(2 * repeats, least_s, last_s)):
                _pass(whole if number % 2 else parts, splits, boundary)
            boundary.finish()
    for each in parts:
        each.rule.clear_gradients()
    means = [each.means_s() for each in parts]
    factors = {name: whole_s / sum(each[name] for each in means) for name, whole_s in whole[0].means_s().items()}
    return [
        LayerTimes(layer, samples, **{name: factors[name] * mean_s for name, mean_s in each.items()})
        for layer, each in zip(layers, means, strict=True)
    ]


def measure_overhead(training: Training, repeats: int, device: torch.device = CPU) -> PassOverhead:
    """Return the overhead of a pass: the median times of ``repeats`` passes through a stage without layers."""
    module = StageModule([nn.Identity()], device, training.precision, copies_inputs=False)
    module.start_step(recompute=False, splits=False)
    number = torch.zeros(1, 1, device=device)
    forward_s, backward_s = [], []
    for _ in range(repeats):
        forward_s.append(_seconds(lambda: module.forward(_MICROBATCH, number.detach().requires_grad_()), device)[0])
        backward_s.append(_seconds(lambda: module.backward(_MICROBATCH, number), device)[0])
    return PassOverhead(median(forward_s), median(backward_s))


def _pass(stage: Sequence["_StagePart"], splits: bool, boundary: Boundary) -> None:
    for each in stage:
        each.module.start_step(recompute=False, splits=splits)
    boundary.receive(Kind.FORWARD)
    _forward(stage, partial(boundary.send, Kind.FORWARD))
    boundary.receive(Kind.BACKWARD)
    _backward(stage, splits, partial(boundary.send, Kind.BACKWARD))
    for each in stage:
        # The next pass may run the same layers in other parts, whose backwards are split on their own.
        each.module.start_step(recompute=False, splits=False)


def _forward(stage: Sequence["_StagePart"], send: Callable[[], None]) -> None:
    outputs: torch.Tensor | None = None
    for part in stage:
        outputs = part.timed("forward_s", partial(part.forward, outputs, send))


def _backward(stage: Sequence["_StagePart"], splits: bool, send: Callable[[], None]) -> None:
    gradient: torch.Tensor | None = None
    for part in reversed(stage):
        run = part.module.backward_input if splits else part.module.backward
        name = "backward_input_s" if splits else "backward_s"
        gradient = part.timed(name, partial(part.backward, run, gradient, send))
    for part in reversed(stage):
        if splits:
            part.timed("backward_weight_s", partial(part.module.backward_weight, _MICROBATCH))
        else:
            # A learning rate of 0, so that gradients summed over all repeats leave the parameters unchanged.
            part.timed("update_s", partial(part.rule.update, 0.0, 0.0))


class _StagePart:
    """Runs layers as `executor.training.real_compute` would, with data, payloads and loss, and times each pass."""

    def __init__(
        self,
        loaded: LoadedModel,
        layers: Sequence[int],
        ends: tuple[int, int],
        samples: int,
        training: Training,
        device: torch.device,
    ) -> None:
        sizes = loaded.sizes
        self.samples, self.device = samples, device
        self._model = loaded.model
        order = DataOrder(loaded.data, training.seed)
        # In training, processes that read ahead have the samples ready before the forward needs them.
        self._ready = order.samples(0, samples) if loaded.workers else None
        self._order = order
        first, last = layers[0], layers[-1]
        self._is_first, self._is_last = first == 0, last == len(sizes) - 1
        self._receives, self._sends = first == ends[0], last == ends[1]
        modules = [loaded.model.layers[layer] for layer in layers]
        self.module = StageModule(
            modules, device, training.precision, copies_inputs=any(sizes[layer].changes_inputs for layer in layers)
        )
        self.rule = UpdateRule([each for module in modules for each in module.parameters()], training)
        self._before = _received(sizes[first - 1].output, samples, device) if self._receives and first else None
        self._after = _received(sizes[last].output, samples, device) if self._sends and not self._is_last else None
        self.records = True
        self._durations: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, work: Callable[[], Result]) -> Result:
        """Call ``work`` and return its result; record the duration for the field ``name`` of `LayerTimes`."""
        seconds, result = _seconds(work, self.device)
        if self.records:
            self._durations[name].append(seconds)
        return result

    def means_s(self) -> dict[str, float]:
        """Return the means of the recorded durations by fields of `LayerTimes`, seconds.

        Not their medians: a step contains many passes, of which some take much longer, above all where the process may
        use only a part of a processor core.
        """
        return {name: fmean(values) for name, values in self._durations.items()}

    def forward(self, previous: torch.Tensor | None, send: Callable[[], None]) -> torch.Tensor:
        """Run the layers forward, from the outputs of the part before if there are any; return outputs or loss.

        The last part of the stage then calls ``send``.
        """
        loss: Loss | None = None
        if self._is_first or self._is_last:
            data, targets = self._ready or self._order.samples(0, self.samples)
        if self._is_last:
            on_device = targets.to(self.device)
            loss = lambda outputs: self._model.loss(outputs, on_device)  # noqa: E731
        if self._is_first:
            inputs = data.to(self.device)
        else:
            received = self._before() if self._before is not None else previous
            assert received is not None, "the layer before has outputs"
            inputs = received.detach().requires_grad_()
        outputs = self.module.forward(_MICROBATCH, inputs, loss)
        if self._after is not None:
            to_payload(outputs)
        if self._sends:
            send()
        return outputs

    def backward(
        self,
        run: Callable[[int, torch.Tensor | None], torch.Tensor | None],
        gradient: torch.Tensor | None,
        send: Callable[[], None],
    ) -> torch.Tensor | None:
        """Call ``run``, a backward of the module, from the gradient of the next part; return the input gradient.

        The first part of the stage then calls ``send``.
        """
        found = run(_MICROBATCH, self._after() if self._after is not None else gradient)
        if self._receives and found is not None:
            to_payload(found)
        if self._receives:
            send()
        return found


def _received(shape: SampleShape, samples: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a function that makes a tensor on the device of a received payload of random numbers.

    A copy engine has brought it to a CUDA device; to others it is copied.
    """
    numbers = torch.randn(samples, *shape.sizes, dtype=shape.dtype)
    payload = to_payload(numbers.to(device) if device.type == "cuda" else numbers).clone()
    return lambda: from_payloads([payload], shape.sizes, shape.dtype, device)


def _seconds(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    synchronize(device)
    start_s = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - start_s, result


def main(agent: str, folder: str) -> None:
    """Measure the layers of this rank's stages with the largest number of samples that the plan gives the rank."""
    client = join_job(agent, folder)
    job, rank = JobFolder(Path(folder)), client.rank
    scenario, plan, _ = job.read()
    torch.set_num_threads(threads_of_a_rank(len(plan.devices)))
    connect(ControlStore(client), rank, len(plan.devices), "profile")
    name = plan.devices[rank]
    assert scenario.code is not None, "a profile needs code"
    training = scenario.training
    loaded = load_with_sizes(scenario.code, training.seed, training.precision, training.data)
    device = compute_device([scenario.cluster.by_name[each].kind for each in plan.devices], rank, "real")
    ranks = {each: place for place, each in enumerate(plan.devices)}
    end = partial(give_up, job, rank, name)
    transport = Transport(name, ranks, scenario, ProcessGroups(1), RunClock(0.0), None, False, False, end)
    programs = compile_plan(plan, scenario)
    exchanges = all(has_one_stage(program) for program in programs.values())
    # Start together, so that each rank measures while the other ranks compute, as in training.
    dist.barrier(timeout=_TIMEOUT)
    measured = [
        times
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica, samples in zip(stage.replicas, stage.most_samples(pipeline.microbatches), strict=True)
        if replica.device == name
        for times in measure_layers(
            loaded,
            stage.layers,
            samples,
            training,
            REPEATS,
            device,
            BoundaryMessages(transport, programs[name]) if exchanges else Pauses(),
            LEAST_S,
        )
    ]
    dist.barrier(timeout=_TIMEOUT)
    transport.close()
    (job.path / f"layers-{rank}.json").write_text(json.dumps([asdict(each) for each in measured]))
    dist.destroy_process_group()
