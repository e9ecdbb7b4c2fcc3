"""What a layer needs of a device's memory: what it keeps from forward to backward, and the most it holds at once."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from executor.training.device import settle
from executor.training.models.loading import LoadedModel, SampleShape
from executor.training.models.trainable import DataOrder
from executor.training.stage_module import Loss, StageModule
from planner.scenario.training import Training

# What a sample keeps is the difference of what two numbers of samples keep: more than one, for layers that need a few.
_FEW, _MORE = 2, 4

_MICROBATCH = 0

# Above all levels that torch's profiler library has.
_SILENT = "99"

Make = Callable[[int], torch.Tensor]


def activations_bytes(loaded: LoadedModel, training: Training) -> list[int]:
    """Return what each layer keeps of a sample for its backward; the model is on the CPU."""
    outputs = [None, *(size.output for size in loaded.sizes[:-1])]
    data = DataOrder(loaded.model, max(_MORE, training.global_batch), training.seed)

    def make(count: int) -> torch.Tensor:
        return data.samples(0, 0, count)[0]

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return loaded.model.loss(outputs, data.samples(0, 0, len(outputs))[1])

    last = len(outputs) - 1
    return [
        activation_bytes(layer, inputs, make, loss if index == last else None)
        for index, (layer, inputs) in enumerate(zip(loaded.model.layers, outputs, strict=True))
    ]


def activation_bytes(layer: nn.Module, inputs: SampleShape | None, make: Make, loss: Loss | None = None) -> int:
    """Return what autograd keeps of a sample for a layer's backward, parameters apart, bytes.

    Args:
        layer: On the CPU.
        inputs: What it takes of one sample; None where that is the model's own data.
        make: Gives the model's own data for some samples.
        loss: Of its outputs, where it is the last one.
    """
    few, more = (
        _kept_bytes(
            layer, make(count) if inputs is None else torch.randn(count, *inputs.sizes, dtype=inputs.dtype), loss
        )
        for count in (_FEW, _MORE)
    )
    return max(0, (more - few) // (_MORE - _FEW))


def stage_peak_bytes(
    loaded: LoadedModel, layers: Sequence[int], samples: int, training: Training, device: torch.device
) -> int:
    """Return the most that forward and backward of one microbatch hold at once, bytes.

    Beside parameters, and gradients that they have already: inputs, what is kept for backward, gradients on their way,
    temporaries. On CUDA torch's allocator says it, on the CPU what torch's profiler notes of its allocator, which does
    not see what libraries take for themselves.

    Args:
        loaded: The model.
        layers: Consecutive.
        samples: Of the microbatch.
        training: The precision, and the global batch.
        device: Where the layers are computed.
    """
    sizes, model = loaded.sizes, loaded.model
    first, last = layers[0], layers[-1]
    copies = any(sizes[layer].changes_inputs for layer in layers)
    chosen = [model.layers[layer] for layer in layers]
    module = StageModule(chosen, device, training.precision, copies_inputs=copies)
    data = DataOrder(model, training.global_batch, training.seed)

    def train() -> None:
        inputs, targets = (each.to(device) for each in data.samples(0, 0, samples))
        if first:
            shape = sizes[first - 1].output
            inputs = torch.zeros(samples, *shape.sizes, dtype=shape.dtype, device=device).requires_grad_()
        loss: Loss | None = (lambda outputs: model.loss(outputs, targets)) if last == len(sizes) - 1 else None
        outputs = module.forward(_MICROBATCH, inputs, loss)
        module.backward(_MICROBATCH, None if loss is not None else torch.zeros_like(outputs))

    module.start_step(recompute=False, splits=False)
    # The first time makes the parameters' gradients.
    train()
    peak_bytes = _peak_on_cuda(train, device) if device.type == "cuda" else _peak_on_cpu(train)
    for layer in chosen:
        layer.zero_grad(set_to_none=True)
    return peak_bytes


def _peak_on_cuda(work: Callable[[], None], device: torch.device) -> int:
    settle(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    settle(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(work: Callable[[], None]) -> int:
    # Else it writes about itself on the standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    with torch.autograd.profiler.profile(use_device=None, profile_memory=True) as taken:
        work()
    results: Any = taken.kineto_results
    changes = [(each.start_ns(), each.nbytes()) for each in results.events() if each.name() == "[memory]"]
    held = most = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        held += change
        most = max(most, held)
    return most


def _kept_bytes(layer: nn.Module, inputs: torch.Tensor, loss: Loss | None) -> int:
    known = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *layer.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    entering = inputs.requires_grad_() if inputs.is_floating_point() else inputs
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # Held until all is counted: a place that is free may be taken again.
        outputs = layer(entering.clone() if entering.requires_grad else entering)
        result = outputs if loss is None else loss(outputs)
    total = sum(kept.values())
    del outputs, result
    return total
