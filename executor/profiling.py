"""How long each layer of a stage takes on a device: forward, both gradients, update."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from executor.compute_device import CPU, settle
from executor.model import LoadedModel, SampleShape
from executor.training.data_order import DataOrder
from executor.training.payloads import from_payloads, to_payload
from executor.training.stage_module import Loss, StageModule
from executor.training.update_rule import UpdateRule
from planner.scenario import Training

_MICROBATCH = 0


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, for one microbatch; medians.

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


def measure_layers(
    loaded: LoadedModel,
    layers: Sequence[int],
    samples: int,
    training: Training,
    repeats: int,
    device: torch.device = CPU,
) -> list[LayerTimes]:
    """Return the times of the layers of a stage.

    Args:
        loaded: The model; its layers are trained on noise and moved to the device.
        layers: Consecutive. The first one receives from the stage before it, if there is one, the last one sends.
        samples: Of a microbatch.
        training: The update rule, the precision, and the global batch.
        repeats: How often each time is taken; the median counts.
        device: Where the layers are computed.
    """
    data = DataOrder(loaded.model, training.global_batch, training.seed)
    ends = (layers[0], layers[-1]) if layers else (0, 0)
    return [_measure(_StageLayer(loaded, layer, ends, samples, training, data, device), repeats) for layer in layers]


class _StageLayer:
    """A layer and what `executor.real_compute` does around it, for one microbatch."""

    def __init__(
        self,
        loaded: LoadedModel,
        layer: int,
        ends: tuple[int, int],
        samples: int,
        training: Training,
        data: DataOrder,
        device: torch.device,
    ) -> None:
        sizes = loaded.sizes
        self.layer, self.samples, self.device = layer, samples, device
        self._model, self._data = loaded.model, data
        self._is_first, self._is_last = layer == 0, layer == len(sizes) - 1
        self._receives, self._sends = layer == ends[0], layer == ends[1]
        self.module = StageModule(
            [loaded.model.layers[layer]], device, training.precision, copies_inputs=sizes[layer].changes_inputs
        )
        self.rule = UpdateRule(list(loaded.model.layers[layer].parameters()), training)
        self._entering = _Noise(None if self._is_first else sizes[layer - 1].output, samples, device)
        self._gradient = _Noise(None if self._is_last else sizes[layer].output, samples, device)

    def forward(self) -> None:
        """Run the layer forward, from the data or the payload before it to the loss or the payload after it."""
        loss: Loss | None = None
        if self._is_first or self._is_last:
            inputs, targets = self._data.samples(0, 0, self.samples)
        if self._is_last:
            aims = targets.to(self.device)
            loss = lambda outputs: self._model.loss(outputs, aims)  # noqa: E731
        if self._is_first:
            entering = inputs.to(self.device)
        else:
            entering = self._entering.take(arrives=self._receives).detach().requires_grad_()
        outputs = self.module.forward(_MICROBATCH, entering, loss)
        if self._sends and not self._is_last:
            to_payload(outputs)

    def backward(self, run: Callable[[int, torch.Tensor | None], torch.Tensor | None]) -> None:
        """Run a method of the module backward, from the payload after it to the payload before it."""
        gradient = None if self._is_last else self._gradient.take(arrives=self._sends)
        found = run(_MICROBATCH, gradient)
        if self._receives and found is not None:
            to_payload(found)


class _Noise:
    """What a layer beside puts out: on the device, or a payload that has arrived on the CPU."""

    def __init__(self, shape: SampleShape | None, samples: int, device: torch.device) -> None:
        self._shape = shape
        if shape is not None:
            self._values = torch.randn(samples, *shape.sizes, dtype=shape.dtype).to(device)
            self._payload = to_payload(self._values).clone()

    def take(self, *, arrives: bool) -> torch.Tensor:
        assert self._shape is not None, "the ends of the model have no layer beside"
        if not arrives:
            return self._values
        return from_payloads([self._payload], self._shape.sizes, self._shape.dtype, self._values.device)


def _measure(work: _StageLayer, repeats: int) -> LayerTimes:
    forward_s, backward_s, input_s, weight_s, update_s = [], [], [], [], []
    module, device = work.module, work.device
    for splits in (False, True):
        module.start_step(recompute=False, splits=splits)
        for _ in range(repeats):
            forward_s.append(_seconds(work.forward, device))
            if splits:
                input_s.append(_seconds(lambda: work.backward(module.backward_input), device))
                weight_s.append(_seconds(lambda: module.backward_weight(_MICROBATCH), device))
            else:
                backward_s.append(_seconds(lambda: work.backward(module.backward), device))
                update_s.append(_seconds(lambda: work.rule.update(0, 0.0), device))
    module.start_step(recompute=False, splits=False)
    work.rule.clear_gradients()
    return LayerTimes(work.layer, work.samples, *map(median, (forward_s, backward_s, input_s, weight_s, update_s)))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    settle(device)
    start_s = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - start_s
