"""The memory that stages need on a device.

    peak = framework
         + bytes per parameter * number of parameters
         + in flight * samples * activations of the stage's layers
         + workspace

All terms are bytes. The second term is for parameters, gradients and optimizer state, and for the copies and buffers of
the framework (`planner.cost.parameter_memory`). The third term is for the microbatches in flight, as in DeepCEE and
Asteroid (depth K_s times the activations of one microbatch). The first term is of
`planner.scenario.effects.MemoryEffects`. `planner.step.memory` computes the peak from the order of actions instead.

The workspace of a layer is what its passes hold only while they run, as measured or as a share of the activations that
it saves (`MemoryEffects`). A backward frees activations from the last layer on, so that the last term is::

    the most over the stage's layers k of: workspace of k - samples * activations of the layers after k

These are the terms of an unsplit backward. Between the two parts of a split one, each layer after k still holds what
its weight gradient needs (`deferred_bytes`), as `planner.step.memory` counts.

A stage that recomputes saves only its input for each microbatch in flight, and holds all activations of one microbatch
while its backward runs. Its third term is::

         + in flight * samples * input + samples * (activations - input)

(Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, with a stage as one segment). The activations include
the input. The input of the first stage counts as 0 bytes, because profiles do not contain it. What the forward of such
a stage holds for one layer at a time is not counted.

A stage fits on no device with less memory than the largest output of its layers has, which profiles may leave out of
the activations.
"""

from bisect import bisect_right
from functools import lru_cache
from math import inf

from planner.cost.parameter_memory import parameter_memory
from planner.plan.plan import Stage
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES


def state_bytes(scenario: Scenario, first_layer: int, end_layer: int, degree: int = 1) -> int:
    """Return the bytes that depend on the parameters of layers ``first_layer`` to ``end_layer - 1`` alone.

    With tensor parallelism these are the bytes of one of the ``degree`` devices that share each layer.
    """
    size_bytes = scenario.model.at_degree(degree).parameter_bytes(first_layer, end_layer)
    return int(size_bytes * parameter_memory(scenario.training).total_bytes // FLOAT32_BYTES)


def saved_activation_bytes(scenario: Scenario, stage: Stage, degree: int = 1) -> int:
    """Return the bytes that a stage saves on a device for one sample from its forward to its backward."""
    if not stage.recompute:
        return scenario.model.at_degree(degree).activation_bytes(stage.first_layer, stage.end_layer)
    return scenario.model.layers[stage.first_layer - 1].output_bytes if stage.first_layer else 0


def recomputed_bytes(scenario: Scenario, stage: Stage, degree: int = 1) -> int:
    """Return the bytes per sample that a backward recomputes and holds, in addition to the saved ones."""
    activations = scenario.model.at_degree(degree).activation_bytes(stage.first_layer, stage.end_layer)
    return max(0, activations - saved_activation_bytes(scenario, stage, degree))


def deferred_bytes(scenario: Scenario, stage: Stage, degree: int = 1) -> int:
    """Return the bytes per sample that a stage holds on a device from its input gradient to its weight gradient.

    Where they were not measured, all activations are taken to stay. In a transformer layer most do (Qi et al., Zero
    Bubble Pipeline Parallelism, 2024: 32 of 34 + 5 as/h units).
    """
    measured = scenario.model.at_degree(degree).deferred_bytes(stage.first_layer, stage.end_layer)
    if measured is not None:
        return measured
    return saved_activation_bytes(scenario, stage, degree) + recomputed_bytes(scenario, stage, degree)


def workspace_bytes(scenario: Scenario, stage: Stage, samples: int, degree: int = 1) -> int:
    """Return the bytes that a backward of ``samples`` holds on a device beside all activations while it runs."""
    return _workspace_bytes(scenario, stage.first_layer, stage.end_layer, samples, degree)


# Cached, because searches ask for the same ranges many times.
@lru_cache(maxsize=65536)
def _workspace_bytes(scenario: Scenario, first_layer: int, end_layer: int, samples: int, degree: int) -> int:
    share = scenario.effects.memory.workspace_share
    return round(scenario.model.at_degree(degree).workspace_bytes(first_layer, end_layer, samples, share))


def split_workspace_bytes(scenario: Scenario, stage: Stage, samples: int, degree: int = 1) -> tuple[int, int]:
    """Return the bytes that the two parts of a split backward of ``samples`` hold while they run.

    The input gradient holds them beside all activations, the weight gradient beside `deferred_bytes`.
    """
    return _split_workspace_bytes(scenario, stage.first_layer, stage.end_layer, samples, degree)


@lru_cache(maxsize=65536)
def _split_workspace_bytes(
    scenario: Scenario, first_layer: int, end_layer: int, samples: int, degree: int
) -> tuple[int, int]:
    share = scenario.effects.memory.workspace_share
    model = scenario.model.at_degree(degree)
    of_input, of_weight = model.split_workspace_bytes(first_layer, end_layer, samples, share)
    return round(of_input), round(of_weight)


def needed_bytes(scenario: Scenario, stage: Stage, samples: int, in_flight: int, degree: int = 1) -> int:
    """Return the peak bytes of a stage on a device with ``in_flight`` microbatches of ``samples`` samples each.

    ``degree`` devices share each layer by tensor parallelism.
    """
    of_sample = in_flight * saved_activation_bytes(scenario, stage, degree) + recomputed_bytes(scenario, stage, degree)
    states = state_bytes(scenario, stage.first_layer, stage.end_layer, degree)
    workspace = workspace_bytes(scenario, stage, samples, degree)
    return scenario.effects.memory.framework_bytes + states + samples * of_sample + workspace


def largest_output_bytes(scenario: Scenario, stage: Stage) -> int:
    """Return the bytes for a sample of the largest output of a stage's layers, whose memory no stage can do without."""
    return _largest_output_bytes(scenario.model, stage.first_layer, stage.end_layer)


@lru_cache(maxsize=65536)
def _largest_output_bytes(model: ModelProfile, first_layer: int, end_layer: int) -> int:
    return max((layer.output_bytes for layer in model.layers[first_layer:end_layer]), default=0)


def most_in_flight(scenario: Scenario, stage: Stage, samples: int, memory_bytes: int, degree: int = 1) -> float:
    """Return how many microbatches of ``samples`` fit into ``memory_bytes``; infinite if they save no activations."""
    free = memory_bytes - needed_bytes(scenario, stage, samples, 0, degree)
    each = samples * saved_activation_bytes(scenario, stage, degree)
    if free < 0 or samples * largest_output_bytes(scenario, stage) > memory_bytes:
        return 0
    return free // each if each else inf


def most_samples(scenario: Scenario, stage: Stage, most: int, in_flight: int, memory_bytes: int) -> int:
    """Return the largest microbatch of up to ``most`` samples that fits into ``memory_bytes``; 0 if none does."""

    def needed(samples: int) -> int:
        return max(needed_bytes(scenario, stage, samples, in_flight), samples * largest_output_bytes(scenario, stage))

    return most if needed(most) <= memory_bytes else bisect_right(range(1, most), memory_bytes, key=needed)
