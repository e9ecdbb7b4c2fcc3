"""Measures the costs of a model's layers (times for several microbatch sizes, memory), and counts their operations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from executor.profiling.counted_work import counted
from executor.profiling.layer_memory import activations_bytes, layer_memory, stage_peak_bytes
from executor.profiling.layer_times import LayerTimes, PassOverhead, measure_layers, measure_overhead
from executor.training.data.order import DataOrder
from executor.training.device import CPU
from executor.training.models.loading import LoadedModel, load_model, user_code
from planner.scenario.profile import PassMemory
from planner.scenario.roofline import LayerWork
from planner.scenario.scenario import Code
from planner.scenario.training import Training
from traces.statistics import ROUNDS, Interval, interval_of

# Number of measurements in each round of the overhead of a pass, which takes microseconds.
_OVERHEAD_REPEATS = 100


@dataclass(frozen=True, slots=True)
class MicrobatchTimes:
    """The times of `LayerTimes` over all rounds, for one microbatch size, less the overhead of a pass."""

    forward_s: Interval
    backward_s: Interval
    backward_input_s: Interval
    backward_weight_s: Interval
    update_s: Interval


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of one layer.

    Attributes:
        name: Index and class of the layer.
        activation_bytes: Bytes that autograd saves per sample from forward to backward, without the output.
        peak_bytes: Peak memory of forward and backward of the largest microbatch, without parameters.
        memory: What is held beside the activations.
        times: The times by microbatch size.
    """

    name: str
    parameter_bytes: int
    output_bytes: int
    activation_bytes: int
    peak_bytes: int
    memory: PassMemory
    times: Mapping[int, MicrobatchTimes]


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The costs of a model on a device.

    Attributes:
        launch_forward_s: Overhead of a forward, which depends neither on layers nor on samples.
        launch_backward_s: Overhead of a backward, which depends neither on layers nor on samples.
        peak_bytes: Peak memory of forward and backward of the largest microbatch through all layers.
    """

    layers: Sequence[LayerCosts]
    launch_forward_s: Interval
    launch_backward_s: Interval
    peak_bytes: int

    @property
    def launch_overhead_s(self) -> float:
        """Mean launch overhead of a forward and a backward; the simulator has one number for both."""
        return (self.launch_forward_s.median + self.launch_backward_s.median) / 2

    @property
    def workspace_share(self) -> float:
        """Largest workspace of a layer (peak memory less saved activations) as a share of the largest activations."""
        samples = max(self.layers[0].times)
        most = samples * max(layer.activation_bytes for layer in self.layers)
        beyond = max(layer.peak_bytes - samples * layer.activation_bytes for layer in self.layers)
        return max(0, beyond) / most if most else 0.0

    def extremes_s(self, samples: int) -> tuple[float, float]:
        """Return forward and backward of all layers, each in its quickest round, and each in its slowest one."""
        times = [layer.times[samples] for layer in self.layers]
        passes = [time for each in times for time in (each.forward_s, each.backward_s)]
        return sum(each.least for each in passes), sum(each.most for each in passes)


def profiling_steps(samples: Sequence[int]) -> int:
    """Return how many times `profile_model` reports its progress."""
    return 1 + (ROUNDS + 1) * len(samples)


def profile_model(
    loaded: LoadedModel,
    samples: Sequence[int],
    training: Training,
    repeats: int,
    device: torch.device = CPU,
    begin: Callable[[str], None] = lambda _: None,
) -> ModelCosts:
    """Measure the costs of each layer.

    Args:
        loaded: The model as loaded; its layers are moved to the device.
        samples: Microbatch sizes to measure, in increasing order.
        training: The optimizer, the precision, and a global batch of at least the largest microbatch.
        repeats: Number of measurements of each time in a round.
        device: The device that computes the layers.
        begin: Called before each of `profiling_steps` parts with a line that describes the part.
    """
    begin("memory")
    activations = activations_bytes(loaded, training)
    layers = range(len(loaded.sizes))
    peaks = [stage_peak_bytes(loaded, [layer], samples[-1], training, device) for layer in layers]
    memory = [layer_memory(loaded, layer, activations[layer], training, device) for layer in layers]
    whole_peak = stage_peak_bytes(loaded, layers, samples[-1], training, device)
    # Several rounds, since the speed of a machine changes with time.
    rounds: list[dict[int, list[LayerTimes]]] = []
    overheads: list[PassOverhead] = []
    for number in range(ROUNDS + 1):
        measured = {}
        for count in samples:
            begin(f"round {number} of {ROUNDS}" if number else "warming up")
            measured[count] = measure_layers(loaded, layers, count, training, repeats, device)
        rounds.append(measured)
        overheads.append(measure_overhead(training, _OVERHEAD_REPEATS, device))
    # The first round warms up.
    del rounds[0], overheads[0]
    costs = [
        LayerCosts(
            _layer_name(loaded, layer),
            loaded.sizes[layer].parameter_bytes,
            loaded.sizes[layer].output.size_bytes,
            activations[layer].activation,
            peaks[layer],
            memory[layer],
            {count: _times([each[count][layer] for each in rounds], overheads, len(layers)) for count in samples},
        )
        for layer in layers
    ]
    return ModelCosts(
        costs,
        interval_of([each.forward_s for each in overheads]),
        interval_of([each.backward_s for each in overheads]),
        whole_peak,
    )


def count_work(loaded: LoadedModel, code: Code, training: Training) -> Sequence[LayerWork]:
    """Count each layer's operations and bytes for one sample; raise `InputError` if a layer depends on values."""
    outputs = DataOrder(loaded.data, training.seed).samples(0, 1)[0].to("meta")
    with torch.device("meta"):
        model = load_model(code, training.seed)
    works = []
    for index, layer in enumerate(model.layers):
        with user_code(code, f"layer {index} cannot be counted"), torch.no_grad():
            outputs, work = counted(partial(layer, outputs))
        works.append(work)
    activations = activations_bytes(loaded, training)
    return [
        LayerWork(
            _layer_name(loaded, index),
            works[index].flop,
            size.parameter_bytes,
            size.output.size_bytes,
            activations[index].activation,
            products=works[index].products,
            kernels=works[index].kernels,
        )
        for index, size in enumerate(loaded.sizes)
    ]


def _layer_name(loaded: LoadedModel, layer: int) -> str:
    return f"{layer}-{type(loaded.model.layers[layer]).__name__.lower()}"


def _times(rounds: Sequence[LayerTimes], overheads: Sequence[PassOverhead], layers: int) -> MicrobatchTimes:
    # All layers together include the overhead once.
    pairs = [
        (times, overhead.forward_s / layers, overhead.backward_s / layers)
        for times, overhead in zip(rounds, overheads, strict=True)
    ]
    return MicrobatchTimes(
        interval_of([max(0.0, times.forward_s - forward_s) for times, forward_s, _ in pairs]),
        interval_of([max(0.0, times.backward_s - backward_s) for times, _, backward_s in pairs]),
        interval_of([max(0.0, times.backward_input_s - backward_s) for times, _, backward_s in pairs]),
        interval_of([times.backward_weight_s for times in rounds]),
        interval_of([times.update_s for times in rounds]),
    )
