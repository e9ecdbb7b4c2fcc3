"""How long each layer of a model takes on this process's device: forward, both gradients, update."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from executor.model import LoadedModel
from executor.training.data_order import DataOrder
from executor.training.stage_module import Loss, StageModule
from executor.training.update_rule import UpdateRule
from planner.scenario import Training

_CPU = torch.device("cpu")
_MICROBATCH = 0


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, for one microbatch; medians.

    Attributes:
        layer: Index in the model.
        samples: In the microbatch.
        forward_s: With the making of the data where the layer is the first or, for the targets, the last one.
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


def measure_layers(
    loaded: LoadedModel, layers: Sequence[int], samples: int, training: Training, repeats: int
) -> list[LayerTimes]:
    """Return the times of some layers for a microbatch of ``samples``, each the median of ``repeats``."""
    data = DataOrder(loaded.model, training.global_batch, training.seed)
    return [_measure(loaded, layer, samples, training, data, repeats) for layer in layers]


def _measure(
    loaded: LoadedModel, layer: int, samples: int, training: Training, data: DataOrder, repeats: int
) -> LayerTimes:
    sizes, last = loaded.sizes, len(loaded.sizes) - 1
    copies_inputs = sizes[layer].changes_inputs
    module = StageModule([loaded.model.layers[layer]], _CPU, training.precision, copies_inputs=copies_inputs)
    rule = UpdateRule(list(loaded.model.layers[layer].parameters()), training)
    entering, targets = data.samples(0, 0, samples)
    if layer:
        before = sizes[layer - 1].output
        entering = torch.randn(samples, *before.sizes, dtype=before.dtype).requires_grad_()
    gradient = None if layer == last else torch.randn(samples, *sizes[layer].output.sizes)
    loss: Loss | None = (lambda outputs: loaded.model.loss(outputs, targets)) if layer == last else None

    def forward() -> None:
        if layer in (0, last):
            data.samples(0, 0, samples)
        module.forward(_MICROBATCH, entering, loss)

    forward_s, backward_s, input_s, weight_s, update_s = [], [], [], [], []
    for splits in (False, True):
        module.start_step(recompute=False, splits=splits)
        for _ in range(repeats):
            entering.grad = None
            forward_s.append(_seconds(forward))
            if splits:
                input_s.append(_seconds(lambda: module.backward_input(_MICROBATCH, gradient)))
                weight_s.append(_seconds(lambda: module.backward_weight(_MICROBATCH)))
            else:
                backward_s.append(_seconds(lambda: module.backward(_MICROBATCH, gradient)))
                update_s.append(_seconds(lambda: rule.update(0, 0.0)))
    module.start_step(recompute=False, splits=False)
    rule.clear_gradients()
    return LayerTimes(layer, samples, *map(median, (forward_s, backward_s, input_s, weight_s, update_s)))


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
