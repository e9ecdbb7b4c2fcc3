"""The memory that stages need on a device.

    peak = framework
         + (2 + optimizer values) * parameters
         + in flight * samples * activations of the stage's layers
         + workspace share * samples * activations of its largest layer

The second line is parameters, gradients and optimizer state, the third the activations of the microbatches in flight
(DeepCEE and Asteroid count the same: K_s times the activations of one microbatch). The first and the last line are what
a framework takes on a real device, `planner.scenario.effects`. `planner.step.memory` follows the order of actions
instead.

A stage that recomputes keeps only its input of each microbatch in flight, and holds all activations of one while its
backward runs. In place of the third line it has::

         + in flight * samples * input + samples * (activations - input)

(Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, with a stage as one segment). The input is one of the
activations; that of the first stage, the model's own, counts as nothing, since profiles do not know it. The activations
of one layer at a time that its forward holds are not counted.
"""

from bisect import bisect_right
from math import inf

from planner.plan.plan import Stage
from planner.scenario.scenario import Scenario
from planner.scenario.training import OPTIMIZER_STATES


def state_bytes(scenario: Scenario, first_layer: int, end_layer: int, degree: int = 1) -> int:
    """Return the bytes of parameters, gradients and optimizer state of layers ``first_layer`` to ``end_layer - 1``.

    With tensor parallelism these are the bytes of one of the ``degree`` devices that share each layer.
    """
    copies = 2 + OPTIMIZER_STATES[scenario.training.optimizer.name]
    return copies * scenario.model.at_degree(degree).parameter_bytes(first_layer, end_layer)


def saved_activation_bytes(scenario: Scenario, stage: Stage, degree: int = 1) -> int:
    """Return the bytes of one sample that a stage keeps on a device from its forward to its backward."""
    if not stage.recompute:
        return scenario.model.at_degree(degree).activation_bytes(stage.first_layer, stage.end_layer)
    return scenario.model.layers[stage.first_layer - 1].output_bytes if stage.first_layer else 0


def recomputed_bytes(scenario: Scenario, stage: Stage, degree: int = 1) -> int:
    """Return the bytes of one sample that a backward holds beside those saved for it."""
    activations = scenario.model.at_degree(degree).activation_bytes(stage.first_layer, stage.end_layer)
    return max(0, activations - saved_activation_bytes(scenario, stage, degree))


def workspace_bytes(scenario: Scenario, stage: Stage, samples: int, degree: int = 1) -> int:
    """Return the bytes that the backward of a stage's largest layer holds only while it runs, on a device."""
    largest = scenario.model.at_degree(degree).largest_activation_bytes(stage.first_layer, stage.end_layer)
    return round(scenario.effects.memory.workspace_share * samples * largest)


def needed_bytes(scenario: Scenario, stage: Stage, samples: int, in_flight: int, degree: int = 1) -> int:
    """Return the peak bytes of a stage on a device.

    Args:
        scenario: Gives the model, the optimizer and what the framework takes.
        stage: Gives the layers, and whether they are recomputed.
        samples: Samples of each microbatch on this device.
        in_flight: Number of microbatches between forward and backward.
        degree: Number of devices that share each layer by tensor parallelism.
    """
    of_sample = in_flight * saved_activation_bytes(scenario, stage, degree) + recomputed_bytes(scenario, stage, degree)
    states = state_bytes(scenario, stage.first_layer, stage.end_layer, degree)
    workspace = workspace_bytes(scenario, stage, samples, degree)
    return scenario.effects.memory.framework_bytes + states + samples * of_sample + workspace


def most_in_flight(scenario: Scenario, stage: Stage, samples: int, memory_bytes: int, degree: int = 1) -> float:
    """Return how many microbatches of ``samples`` a device of ``memory_bytes`` holds; infinite if they keep nothing."""
    free = memory_bytes - needed_bytes(scenario, stage, samples, 0, degree)
    each = samples * saved_activation_bytes(scenario, stage, degree)
    if free < 0:
        return 0
    return free // each if each else inf


def most_samples(scenario: Scenario, stage: Stage, most: int, in_flight: int, memory_bytes: int) -> int:
    """Return how many samples of a microbatch, ``most`` at most, a device of ``memory_bytes`` can hold; 0 if none."""

    def needed(samples: int) -> int:
        return needed_bytes(scenario, stage, samples, in_flight)

    return most if needed(most) <= memory_bytes else bisect_right(range(1, most), memory_bytes, key=needed)
