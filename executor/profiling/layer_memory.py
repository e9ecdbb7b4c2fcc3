"""Measures the memory of layers: what autograd saves from forward to backward, and the peak during both."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from planner.scenario.profile import PassMemory, SplitMemory, Workspace
from planner.scenario.training import Training

# The memory per sample is a difference between these numbers of samples; both exceed 1, which some layers require.
_FEW, _MORE = 2, 4

# The numbers of samples between which a layer's peak is taken to be a line.
_PEAK_SAMPLES = (4, 16)

_MICROBATCH = 0

# A log level of Kineto, torch's profiler library, at which it logs nothing.
_SILENT = "99"

# Name under which the profiler notes the work whose peak is measured.
_WORK = "measured work"


def _nothing() -> None:
    pass


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
    with _passes(loaded, layers, samples, training, device, splits=False) as stage:

        def train() -> None:
            stage.forward()
            stage.backward()

        # The first pass allocates the parameters' gradients, and their copies in half precision.
        train()
        return _peak(train, device)


class _Passes:
    """The passes of layers as a stage, for one microbatch that is always the same."""

    def __init__(
        self, loaded: LoadedModel, layers: Sequence[int], samples: int, training: Training, device: torch.device
    ) -> None:
        self._loaded, self._layers, self._samples, self._device = loaded, layers, samples, device
        copies = any(loaded.sizes[layer].changes_inputs for layer in layers)
        chosen = [loaded.model.layers[layer] for layer in layers]
        self.module = StageModule(chosen, device, training.precision, copies_inputs=copies)
        self._data = DataOrder(loaded.data, training.seed)
        # Shape and type of the gradient of the outputs; None if they are the loss.
        self._gradient: tuple[torch.Size, torch.dtype] | None = None

    def forward(self) -> None:
        """Run the forward of the data, or of zeros in place of what the stage before sends."""
        sizes, model, first = self._loaded.sizes, self._loaded.model, self._layers[0]
        inputs, targets = (each.to(self._device) for each in self._data.samples(0, self._samples))
        if first:
            shape = sizes[first - 1].output
            inputs = torch.zeros(self._samples, *shape.sizes, dtype=shape.dtype, device=self._device).requires_grad_()
        last = self._layers[-1] == len(sizes) - 1
        loss: Loss | None = (lambda outputs: model.loss(outputs, targets)) if last else None
        # In a step the outputs are then with the next stage, unless a layer saves them.
        outputs = self.module.forward(_MICROBATCH, inputs, loss)
        self._gradient = None if last else (outputs.shape, outputs.dtype)

    def backward(self) -> None:
        """Run the unsplit backward."""
        self.module.backward(_MICROBATCH, self._received())

    def backward_input(self) -> None:
        """Run the first part of a split backward."""
        self.module.backward_input(_MICROBATCH, self._received())

    def backward_weight(self) -> None:
        """Run the second part of a split backward."""
        self.module.backward_weight(_MICROBATCH)

    def _received(self) -> torch.Tensor | None:
        if self._gradient is None:
            return None
        size, dtype = self._gradient
        return torch.zeros(size, dtype=dtype, device=self._device)


@contextmanager
def _passes(
    loaded: LoadedModel,
    layers: Sequence[int],
    samples: int,
    training: Training,
    device: torch.device,
    *,
    splits: bool,
) -> Iterator[_Passes]:
    """Return a context with the passes of layers, after which these are as before."""
    stage = _Passes(loaded, layers, samples, training, device)
    stage.module.start_step(recompute=False, splits=splits)
    with shared_copies():
        yield stage
    stage.module.start_step(recompute=False, splits=False)
    for layer in layers:
        loaded.model.layers[layer].zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class _SplitBytes:
    """Bytes of one microbatch in a layer whose backward is split.

    Attributes:
        forward_peak: Peak of the forward.
        input_peak: Peak of the input gradient, with what the forward leaves.
        deferred: What is held between the two parts.
        weight_peak: Peak of the weight gradient beside ``deferred``.
    """

    forward_peak: int
    input_peak: int
    deferred: int
    weight_peak: int


def _split_bytes(
    loaded: LoadedModel, layer: int, samples: int, training: Training, device: torch.device
) -> _SplitBytes:
    with _passes(loaded, [layer], samples, training, device, splits=True) as stage:

        def train_input() -> None:
            stage.forward()
            stage.backward_input()

        # The first pass allocates the parameters' gradients, and their copies in half precision.
        train_input()
        stage.backward_weight()
        forward_peak = _peak(stage.forward, device)
        stage.backward()
        input_peak = _peak(stage.backward_input, device, after=stage.forward)
        deferred = stage.module.deferred_bytes(_MICROBATCH)
        stage.backward_weight()
        weight_peak = _peak(stage.backward_weight, device, after=train_input) - deferred
        return _SplitBytes(forward_peak, input_peak, deferred, weight_peak)


def layer_memory(
    loaded: LoadedModel, layer: int, saved: SavedBytes, training: Training, device: torch.device
) -> PassMemory:
    """Measure what the passes of a layer hold beside the activations ``saved``.

    The parts that do and do not depend on samples are those of a line through two numbers of samples.
    """
    whole = [stage_peak_bytes(loaded, [layer], count, training, device) for count in _PEAK_SAMPLES]
    split = [_split_bytes(loaded, layer, count, training, device) for count in _PEAK_SAMPLES]
    deferred = _line([each.deferred for each in split])
    return PassMemory(
        saved.output,
        _line(whole, saved.activation),
        SplitMemory(
            deferred.sample_bytes,
            _line([each.forward_peak for each in split], saved.activation),
            _line([each.input_peak for each in split], saved.activation),
            _line([each.weight_peak for each in split]),
        ),
    )


def _line(peaks: Sequence[int], sample_bytes: int = 0) -> Workspace:
    """Return the line through the bytes at `_PEAK_SAMPLES`, less ``sample_bytes`` for each sample."""
    few, more = (peak - count * sample_bytes for count, peak in zip(_PEAK_SAMPLES, peaks, strict=True))
    of_sample = max(0, (more - few) // (_PEAK_SAMPLES[1] - _PEAK_SAMPLES[0]))
    return Workspace(max(0, few - _PEAK_SAMPLES[0] * of_sample), of_sample)


def _peak(work: Callable[[], None], device: torch.device, after: Callable[[], None] = _nothing) -> int:
    """Return the most bytes that are held at once during ``work``, beyond those held before ``after``."""
    return _peak_on_cuda(work, device, after) if device.type == "cuda" else peak_on_cpu(work, after)


def _peak_on_cuda(work: Callable[[], None], device: torch.device, after: Callable[[], None]) -> int:
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    after()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def peak_on_cpu(work: Callable[[], None], after: Callable[[], None] = _nothing) -> int:
    """Return the most bytes that torch's allocator on the CPU holds at once during ``work``.

    Bytes that are held before ``after``, which runs before ``work``, do not count.
    """
    # By default the profiler library logs to the standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    with torch.autograd.profiler.profile(use_device=None, profile_memory=True) as profile:
        after()
        with torch.autograd.profiler.record_function(_WORK):
            work()
    results: Any = profile.kineto_results
    events = sorted(results.events(), key=lambda each: each.start_ns())
    begin_ns = next(each.start_ns() for each in events if each.name() == _WORK)
    changes = [(each.start_ns() >= begin_ns, int(each.nbytes())) for each in events if each.name() == "[memory]"]
    before_bytes = sum(size_bytes for is_during, size_bytes in changes if not is_during)
    return max(accumulate((size_bytes for is_during, size_bytes in changes if is_during), initial=before_bytes))


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
