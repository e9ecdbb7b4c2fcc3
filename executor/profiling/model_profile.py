"""What a model costs on this machine: each layer's times for several sizes of microbatches, and its bytes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from executor.profiling.layer_memory import activations_bytes, stage_peak_bytes
from executor.profiling.layer_times import LayerTimes, PassOverhead, measure_layers, measure_overhead
from executor.training.device import CPU
from executor.training.models.loading import LoadedModel, load_model, user_code
from executor.training.models.trainable import DataOrder
from planner.scenario.roofline import LayerWork
from planner.scenario.scenario import ModelCode
from planner.scenario.training import Training
from traces.probe.interval import ROUNDS, Interval, interval_of


def count_work(loaded: LoadedModel, code: ModelCode, training: Training) -> Sequence[LayerWork]:
    """Return each layer's work and bytes for one sample.

    Args:
        loaded: The model, which gives the data.
        code: It is built again from this, without memory.
        training: The seed.

    Raises:
        InputError: A layer cannot do without values.
    """
    samples, _ = DataOrder(loaded.model, 1, training.seed).samples(0, 0, 1)
    passed = samples.to("meta")
    with torch.device("meta"):
        model = load_model(code, training.seed)
    flop = []
    for index, layer in enumerate(model.layers):
        counter = FlopCounterMode(display=False)
        with user_code(code.path, f"layer {index} cannot be counted"), torch.no_grad(), counter:
            passed = layer(passed)
        flop.append(float(counter.get_total_flops()))
    activations = activations_bytes(loaded, training)
    return [
        LayerWork(
            f"{index}-{type(layer).__name__.lower()}",
            flop[index],
            loaded.sizes[index].parameter_bytes,
            loaded.sizes[index].output.size_bytes,
            activations[index],
        )
        for index, layer in enumerate(loaded.model.layers)
    ]


# Of each round: a pass without layers takes microseconds.
_OVERHEAD_REPEATS = 100


@dataclass(frozen=True, slots=True)
class MicrobatchTimes:
    """One layer's times for a microbatch of some samples, and of the optimizer's update; seconds.

    Attributes:
        forward_s: Beyond what a stage takes without layers, as all times of passes.
        backward_s: Both gradients in one go.
        backward_input_s: That of the input, where backward is split.
        backward_weight_s: Those of the weights, where backward is split.
        update_s: Once a step.
    """

    forward_s: Interval
    backward_s: Interval
    backward_input_s: Interval
    backward_weight_s: Interval
    update_s: Interval


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """One layer.

    Attributes:
        name: Its number and its class.
        parameter_bytes: Of all its parameters.
        output_bytes: Of one sample.
        activation_bytes: Kept of one sample from forward to backward.
        peak_bytes: The most that a pass of the largest microbatch holds at once, beside parameters and their gradients.
        times: Samples of a microbatch to its times.
    """

    name: str
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    peak_bytes: int
    times: Mapping[int, MicrobatchTimes]


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model on a device.

    Attributes:
        layers: In order.
        launch_forward_s: What a forward takes whatever layers it has and however many samples, seconds.
        launch_backward_s: The same of a backward.
        peak_bytes: The most that forward and backward of the largest microbatch through all layers hold at once.
    """

    layers: Sequence[LayerCosts]
    launch_forward_s: Interval
    launch_backward_s: Interval
    peak_bytes: int

    @property
    def launch_overhead_s(self) -> float:
        """Of a forward and a backward, in the mean: simulations have one figure for both."""
        return (self.launch_forward_s.median + self.launch_backward_s.median) / 2

    @property
    def workspace_share(self) -> float:
        """What a pass holds beyond what its layer keeps, relative to what the layer that keeps most does."""
        samples = max(self.layers[0].times)
        most = samples * max(layer.activation_bytes for layer in self.layers)
        beyond = max(layer.peak_bytes - samples * layer.activation_bytes for layer in self.layers)
        return max(0, beyond) / most if most else 0.0


def profiling_steps(samples: Sequence[int]) -> int:
    """Return how often `profile_model` tells of its progress."""
    return 1 + (ROUNDS + 1) * len(samples)


def profile_model(
    loaded: LoadedModel,
    samples: Sequence[int],
    training: Training,
    repeats: int,
    device: torch.device = CPU,
    begin: Callable[[str], None] = lambda _: None,
) -> ModelCosts:
    """Return what each layer costs.

    Args:
        loaded: The model; its layers are moved to the device.
        samples: Sizes of microbatches, rising.
        training: The update rule, the precision, and a global batch of the largest size at least.
        repeats: How often each time is taken in a round.
        device: Where the layers are computed.
        begin: Called with a line about what comes next, `profiling_steps` times.
    """
    begin("memory")
    activations = activations_bytes(loaded, training)
    layers = range(len(loaded.sizes))
    peaks = [stage_peak_bytes(loaded, [layer], samples[-1], training, device) for layer in layers]
    whole_peak = stage_peak_bytes(loaded, layers, samples[-1], training, device)
    # Rounds lie apart in time: this machine is not always equally fast.
    rounds: list[dict[int, list[LayerTimes]]] = []
    overheads: list[PassOverhead] = []
    for number in range(ROUNDS + 1):
        measured = {}
        for count in samples:
            begin(f"round {number} of {ROUNDS}" if number else "warming up")
            measured[count] = measure_layers(loaded, layers, count, training, repeats, device)
        rounds.append(measured)
        overheads.append(measure_overhead(training, _OVERHEAD_REPEATS, device))
    # The first one has only warmed up.
    del rounds[0], overheads[0]
    costs = [
        LayerCosts(
            f"{layer}-{type(loaded.model.layers[layer]).__name__.lower()}",
            loaded.sizes[layer].parameter_bytes,
            loaded.sizes[layer].output.size_bytes,
            activations[layer],
            peaks[layer],
            {count: _times([each[count][layer] for each in rounds], overheads) for count in samples},
        )
        for layer in layers
    ]
    return ModelCosts(
        costs,
        interval_of([each.forward_s for each in overheads]),
        interval_of([each.backward_s for each in overheads]),
        whole_peak,
    )


def _times(rounds: Sequence[LayerTimes], overheads: Sequence[PassOverhead]) -> MicrobatchTimes:
    pairs = list(zip(rounds, overheads, strict=True))
    return MicrobatchTimes(
        interval_of([max(0.0, times.forward_s - once.forward_s) for times, once in pairs]),
        interval_of([max(0.0, times.backward_s - once.backward_s) for times, once in pairs]),
        interval_of([max(0.0, times.backward_input_s - once.backward_s) for times, once in pairs]),
        interval_of([times.backward_weight_s for times in rounds]),
        interval_of([times.update_s for times in rounds]),
    )
