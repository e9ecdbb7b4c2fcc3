"""Measures the memory of layers: what autograd saves from forward to backward, and the peak during both."""

import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from executor.training.data.order import DataOrder
from executor.training.device import CPU, synchronize
from executor.training.models.loading import LoadedModel, SampleShape
from executor.training.models.precision import autocast, boundary_dtype, shared_copies
from executor.training.stage_module import Loss, StageModule
from planner.scenario.profile import PassMemory
from planner.scenario.training import Training

# The memory per sample is a difference between these numbers of samples; both exceed 1, which some layers require.
_FEW, _MORE = 2, 4

# The numbers of samples between which a layer's peak is taken to be a line.
_PEAK_SAMPLES = (4, 16)

_MICROBATCH = 0

# A log level of Kineto, torch's profiler library, at which it logs nothing.
_SILENT = "99"


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes per sample that autograd saves for a layer's backward, without parameters.

    Attributes:
        inner: What is neither the input nor the output.
        input: The input, if it is saved.
        output: The output, as it passes to the next layer, if the layer itself saves it.
    """

    inner: int
    input: int
    output: int

    @property
    def activation(self) -> int:
        """All but the output, which is the input of the next layer."""
        return self.inner + self.input

    def after(self, before: "SavedBytes | None") -> "SavedBytes":
        """Return the same with the input saved if the layer before saves it."""
        return self if before is None else replace(self, input=max(self.input, before.output))


def activations_bytes(loaded: LoadedModel, training: Training) -> list[SavedBytes]:
    """Return, for each layer of a model on the CPU, the bytes per sample that autograd saves for its backward.

    The input of a layer counts as its own, also if only the layer before saves it.
    """
    inputs = [None, *(size.output for size in loaded.sizes[:-1])]
    data = DataOrder(loaded.data, training.seed)

    def make(count: int) -> torch.Tensor:
        return data.samples(0, count)[0]

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return loaded.model.loss(outputs, data.samples(0, len(outputs))[1])

    last = len(inputs) - 1
    alone = [
        saved_bytes(layer, shape, make, loss if index == last else None, training.precision)
        for index, (layer, shape) in enumerate(zip(loaded.model.layers, inputs, strict=True))
    ]
    return [own.after(before) for before, own in zip([None, *alone], alone, strict=False)]


def saved_bytes(
    layer: nn.Module,
    inputs: SampleShape | None,
    make: Callable[[int], torch.Tensor],
    loss: Loss | None = None,
    precision: str = "fp32",
) -> SavedBytes:
    """Return the bytes per sample that autograd saves for a layer's backward.

    Args:
        layer: The layer, on the CPU.
        inputs: Shape of the layer's input for one sample; None if the input is the model's data.
        make: Returns the model's data for a number of samples.
        loss: The model's loss function for the last layer; None for other layers.
        precision: One of `planner.scenario.training.PRECISIONS`.
    """

    def saved(count: int) -> SavedBytes:
        samples = make(count) if inputs is None else torch.randn(count, *inputs.sizes, dtype=inputs.dtype)
        return _saved_bytes(layer, samples, loss, precision)

    few, more = saved(_FEW), saved(_MORE)
    of_sample = (max(0, (b - a) // (_MORE - _FEW)) for a, b in zip(astuple(few), astuple(more), strict=True))
    return SavedBytes(*of_sample)


def stage_peak_bytes(
    loaded: LoadedModel, layers: Sequence[int], samples: int, training: Training, device: torch.device
) -> int:
    """Return the peak memory of a forward and backward of one microbatch of ``samples`` samples, in bytes.

    The peak includes inputs, activations, gradients of activations and temporaries, but neither parameters nor their
    gradients or copies. It is measured by torch's allocator; on the CPU it lacks memory that libraries allocate
    themselves.
    """
    sizes, model = loaded.sizes, loaded.model
    first, last = layers[0], layers[-1]
    copies = any(sizes[layer].changes_inputs for layer in layers)
    chosen = [model.layers[layer] for layer in layers]
    module = StageModule(chosen, device, training.precision, copies_inputs=copies)
    data = DataOrder(loaded.data, training.seed)

    def train() -> None:
        inputs, targets = (each.to(device) for each in data.samples(0, samples))
        if first:
            shape = sizes[first - 1].output
            inputs = torch.zeros(samples, *shape.sizes, dtype=shape.dtype, device=device).requires_grad_()
        loss: Loss | None = (lambda outputs: model.loss(outputs, targets)) if last == len(sizes) - 1 else None
        outputs = module.forward(_MICROBATCH, inputs, loss)
        size, dtype = outputs.shape, outputs.dtype
        # In a step the outputs are with the next stage, unless a layer saves them.
        del outputs
        module.backward(_MICROBATCH, None if loss is not None else torch.zeros(size, dtype=dtype, device=device))

    module.start_step(recompute=False, splits=False)
    with shared_copies():
        # The first pass allocates the parameters' gradients, and their copies in half precision.
        train()
        peak_bytes = _peak_on_cuda(train, device) if device.type == "cuda" else peak_on_cpu(train)
    for layer in chosen:
        layer.zero_grad(set_to_none=True)
    return peak_bytes


def layer_memory(
    loaded: LoadedModel, layer: int, saved: SavedBytes, training: Training, device: torch.device
) -> PassMemory:
    """Measure what the passes of a layer hold beside the activations ``saved``.

    The parts that do and do not depend on samples are those of a line through two numbers of samples.
    """
    few, more = (
        stage_peak_bytes(loaded, [layer], count, training, device) - count * saved.activation for count in _PEAK_SAMPLES
    )
    sample_bytes = max(0, (more - few) // (_PEAK_SAMPLES[1] - _PEAK_SAMPLES[0]))
    return PassMemory(saved.output, max(0, few - _PEAK_SAMPLES[0] * sample_bytes), sample_bytes)


def _peak_on_cuda(work: Callable[[], None], device: torch.device) -> int:
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_on_cpu(work: Callable[[], None]) -> int:
    """Return the most bytes that torch's allocator on the CPU holds at once during ``work``, beyond those before."""
    # By default the profiler library logs to the standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    with torch.autograd.profiler.profile(use_device=None, profile_memory=True) as profile:
        work()
    results: Any = profile.kineto_results
    allocations = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(accumulate((int(each.nbytes()) for each in allocations), initial=0))


def _saved_bytes(layer: nn.Module, inputs: torch.Tensor, loss: Loss | None, precision: str) -> SavedBytes:
    own = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *layer.buffers())}
    saved: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    entering = inputs.requires_grad_().clone() if inputs.is_floating_point() else inputs
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), autocast(precision, CPU):
        # Keep the outputs until all storages are counted, since the address of freed memory may be reused.
        outputs = layer(entering)
        result = outputs.to(boundary_dtype(precision)) if loss is None else loss(outputs)
    # What passes to the next layer is the converted output; in half precision the layer may save the other one.
    output = saved.pop(result.untyped_storage().data_ptr(), 0) if loss is None else 0
    entered = saved.pop(entering.untyped_storage().data_ptr(), 0)
    found = SavedBytes(sum(saved.values()), entered, output)
    del entering, outputs, result
    return found
