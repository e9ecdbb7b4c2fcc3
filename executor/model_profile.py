"""What a model costs on this machine: each layer's times for several sizes of microbatches, and its bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from executor.compute_device import CPU
from executor.model import LoadedModel, SampleShape
from executor.profiling import LayerTimes, measure_layers
from executor.training.data_order import DataOrder
from planner.scenario import Training

# Rounds lie apart in time: this machine is not always equally fast. The median of all that could be measured lies
# between the least and the most of six medians with a probability of 1 - 2 / 2^6 = 97 %, however times are spread.
ROUNDS = 6
CONFIDENCE = 1 - 2 / 2**ROUNDS

# What a sample keeps is the difference of what two numbers of samples keep: more than one, for layers that need a few.
_FEW, _MORE = 2, 4


@dataclass(frozen=True, slots=True)
class Measured:
    """A time that was taken in several rounds, seconds; ``least_s`` to ``most_s`` holds with `CONFIDENCE`."""

    least_s: float
    median_s: float
    most_s: float


@dataclass(frozen=True, slots=True)
class MicrobatchTimes:
    """One layer's times for a microbatch of some samples, and of the optimizer's update."""

    forward: Measured
    backward_input: Measured
    backward_weight: Measured
    update: Measured


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """One layer.

    Attributes:
        name: Its number and its class.
        parameter_bytes: Of all its parameters.
        output_bytes: Of one sample.
        activation_bytes: Kept of one sample from forward to backward.
        times: Samples of a microbatch to its times.
    """

    name: str
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    times: Mapping[int, MicrobatchTimes]


def profile_model(
    loaded: LoadedModel,
    samples: Sequence[int],
    training: Training,
    repeats: int,
    device: torch.device = CPU,
    tell: Callable[[str], None] = lambda _: None,
) -> list[LayerCosts]:
    """Return what each layer costs.

    Args:
        loaded: The model; its layers are trained on noise and moved to the device.
        samples: Sizes of microbatches, rising.
        training: The update rule, the precision, and a global batch of the largest size at least.
        repeats: How often each time is taken in a round, of which the median counts.
        device: Where the layers are computed.
        tell: Called with a line about the progress before each round.
    """
    activations = [activation_bytes(*each) for each in _with_inputs(loaded, training)]
    layers = range(len(loaded.sizes))
    rounds: list[dict[int, list[LayerTimes]]] = []
    # The first one only warms up.
    for number in range(ROUNDS + 1):
        tell(f"round {number} of {ROUNDS}" if number else "warming up")
        rounds.append({count: measure_layers(loaded, layers, count, training, repeats, device) for count in samples})
    return [
        LayerCosts(
            f"{layer}-{type(loaded.model.layers[layer]).__name__.lower()}",
            loaded.sizes[layer].parameter_bytes,
            loaded.sizes[layer].output.size_bytes,
            activations[layer],
            {count: _times([each[count][layer] for each in rounds[1:]]) for count in samples},
        )
        for layer in layers
    ]


def activation_bytes(layer: nn.Module, inputs: SampleShape | None, make: Callable[[int], torch.Tensor]) -> int:
    """Return what autograd keeps of a sample for a layer's backward, parameters apart, bytes.

    Args:
        layer: On the CPU.
        inputs: What it takes of one sample; None where that is the model's own data.
        make: Gives the model's own data for some samples.
    """
    few, more = (
        _kept_bytes(layer, make(count) if inputs is None else torch.randn(count, *inputs.sizes, dtype=inputs.dtype))
        for count in (_FEW, _MORE)
    )
    return max(0, (more - few) // (_MORE - _FEW))


def _with_inputs(
    loaded: LoadedModel, training: Training
) -> list[tuple[nn.Module, SampleShape | None, Callable[[int], torch.Tensor]]]:
    outputs = [None, *(size.output for size in loaded.sizes[:-1])]

    def make(count: int) -> torch.Tensor:
        model = loaded.model
        inputs, _ = DataOrder(model, max(count, training.global_batch), training.seed).samples(0, 0, count)
        return inputs

    return [(layer, inputs, make) for layer, inputs in zip(loaded.model.layers, outputs, strict=True)]


def _kept_bytes(layer: nn.Module, inputs: torch.Tensor) -> int:
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
    total = sum(kept.values())
    del outputs
    return total


def _times(rounds: Sequence[LayerTimes]) -> MicrobatchTimes:
    return MicrobatchTimes(
        *(
            _measured([getattr(each, name) for each in rounds])
            for name in ("forward_s", "backward_input_s", "backward_weight_s", "update_s")
        )
    )


def _measured(seconds: Sequence[float]) -> Measured:
    return Measured(min(seconds), median(seconds), max(seconds))
