"""Running sums of the costs of layers on one device; the difference of two entries is the cost of a range of layers."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost.memory import state_bytes
from planner.cost.tensor_parallel import slowest_group, with_group_sums
from planner.scenario.profile import NO_TIME, ComputeTimes
from planner.scenario.scenario import Scenario

Floats = NDArray[np.float64]


def with_launches(times: ComputeTimes, scenario: Scenario) -> ComputeTimes:
    """Return compute times of one microbatch on one stage, with the overhead of launching kernels added.

    The overhead is added once to the forward and once to the backward (to the input gradient, if it is split).
    """
    launch_s = scenario.effects.compute.launch_overhead_s
    return ComputeTimes(times.forward_s + launch_s, times.backward_input_s + launch_s, times.backward_weight_s)


def launches_s(scenario: Scenario) -> float:
    """Return the launch overhead of the forward and the backward of one microbatch on one stage, seconds."""
    return with_launches(NO_TIME, scenario).total_s


@dataclass(frozen=True, eq=False, slots=True)
class LayerTable:
    """Costs of layers on one device. All arrays but `layer_s` have shape [layers + 1]: entry i sums layers 0 to i - 1.

    Attributes:
        layer_s: Forward and backward of one microbatch in each layer, without launch overhead, seconds, shape [layers].
        compute_s: Running sum of `layer_s`, seconds.
        forward_s: Forward of one microbatch, seconds.
        backward_s: Input and weight gradients of one microbatch, seconds.
        state_bytes: Bytes of parameters, gradients and optimizer state.
        activation_bytes: Bytes of activations saved for one sample until its backward.
    """

    layer_s: Floats
    compute_s: Floats
    forward_s: Floats
    backward_s: Floats
    parameter_bytes: Floats
    state_bytes: Floats
    activation_bytes: Floats


@lru_cache(maxsize=4096)
def layer_table(scenario: Scenario, kind: str, samples: int, degree: int = 1, *, recompute: bool = False) -> LayerTable:
    """Return the costs of the model's layers on one kind of device, for microbatches of ``samples`` on the device.

    ``degree`` devices share each layer by tensor parallelism. With ``recompute``, each backward repeats the forward.

    Raises:
        InputError: The profile has no times for the kind, or none for the degree.
    """
    model = scenario.model.at_degree(degree)
    layers = range(len(model.layers))
    times = [model.times(layer, layer + 1, kind, samples) for layer in layers]
    if degree > 1:
        group = slowest_group(scenario, kind, degree)
        times = [
            with_group_sums(each, scenario, range(layer, layer + 1), samples, group) for layer, each in enumerate(times)
        ]
    layer_s = np.array([each.total_s + (each.forward_s if recompute else 0.0) for each in times])
    return LayerTable(
        layer_s,
        running_sums(layer_s),
        running_sums(each.forward_s for each in times),
        running_sums(each.backward_s for each in times),
        *_layer_bytes(scenario, degree),
    )


@lru_cache(maxsize=256)
def _layer_bytes(scenario: Scenario, degree: int) -> tuple[Floats, Floats, Floats]:
    layers = scenario.model.at_degree(degree).layers
    return (
        running_sums(layer.parameter_bytes for layer in layers),
        running_sums(state_bytes(scenario, layer, layer + 1, degree) for layer in range(len(layers))),
        running_sums(layer.activation_bytes for layer in layers),
    )


def range_memory(
    scenario: Scenario, samples: int, degree: int = 1, *, recompute: bool = False
) -> tuple[Floats, Floats]:
    """Return the memory that each range of layers needs as a stage, by the formula in `planner.cost.memory`.

    It does not say which outputs no memory holds; plans with such stages are refused (`planner.check.memory`).
    A microbatch has ``samples`` samples on the device; ``degree`` devices share each layer by tensor parallelism. With
    ``recompute``, the stage saves only its input and recomputes activations.

    Returns:
        Two arrays of shape [layers + 1, layers + 1], indexed by first layer and end layer (exclusive): bytes with no
        microbatch in flight, and bytes that each microbatch in flight adds. Entries of empty ranges are 0.
    """
    kept = _kept_memory if len(scenario.model.layers) <= _FEW_LAYERS else _large_memory
    return kept(scenario, samples, degree, recompute)


def _range_memory(scenario: Scenario, samples: int, degree: int, recompute: bool) -> tuple[Floats, Floats]:
    layers = scenario.model.at_degree(degree).layers
    _, states, activations = (each[None, :] - each[:, None] for each in _layer_bytes(scenario, degree))
    outputs = np.array([0.0, *(layer.saved_output_bytes for layer in layers)])
    activations = activations + outputs[None, :]
    effects = scenario.effects.memory
    # The workspace of a layer, and all that is saved until its backward has ended.
    until = samples * running_sums(layer.activation_bytes for layer in layers)
    during = np.array([layer.workspace_bytes(samples, effects.workspace_share) for layer in layers]) + until[1:]
    workspace = np.zeros_like(states)
    for first in range(len(layers)):
        beside = np.maximum.accumulate(during[first:]) - until[first + 1 :] - samples * outputs[first + 1 :]
        workspace[first, first + 1 :] = np.maximum(0.0, beside)
    saved = activations
    if recompute:
        inputs = [0.0, *(layer.output_bytes for layer in scenario.model.layers)]
        saved = np.broadcast_to(np.array(inputs)[:, None], states.shape)
    resident = effects.framework_bytes + states + np.round(workspace) + samples * np.maximum(0.0, activations - saved)
    return np.triu(resident, 1), np.triu(samples * saved, 1)


# Of a model with a thousand layers, each of the arrays takes 8 MB: fewer are kept.
_FEW_LAYERS = 200
_kept_memory, _large_memory = lru_cache(maxsize=256)(_range_memory), lru_cache(maxsize=16)(_range_memory)


def mean_compute_s(scenario: Scenario, samples: int) -> Floats:
    """Return the running sum of layers' forward and backward, averaged over all devices, seconds, [layers + 1]."""
    kinds = [device.kind for device in scenario.cluster.devices]
    layers = range(len(scenario.model.layers))
    return running_sums(
        sum(scenario.model.times(layer, layer + 1, kind, samples).total_s for kind in kinds) / len(kinds)
        for layer in layers
    )


def running_sums(values: Iterable[float]) -> Floats:
    """Return an array of shape [values + 1] whose entry i is the sum of the first i values."""
    return np.concatenate(([0.0], np.cumsum(np.fromiter(values, np.float64))))
