"""The memory that stages need on a device.

    peak = framework
         + (2 + optimizer values) * parameters
         + in flight * samples * activations of the stage's layers
         + workspace share * samples * activations of its largest layer

Parameters, gradients and optimizer state, plus the activations of the microbatches in flight (DeepCEE and Asteroid
count the same: K_s times the activations of one microbatch). The first and the last line are what a framework takes
on a real device, `planner.scenario.effects`. `planner.step.memory` follows the order of actions instead.

A stage that recomputes keeps only its input of each microbatch in flight, and holds all activations of one while its
backward runs::

         + in flight * samples * input + samples * (activations - input)

in place of the third line (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, with a stage as one
segment). The input is among the activations; that of the first stage, the model's own, is counted as nothing, since
profiles do not know it. What its forward holds while it runs, one layer's activations at a time, is not counted.
"""

from planner.plan.plan import Replica, Stage
from planner.scenario.scenario import Scenario
from planner.scenario.training import OPTIMIZER_STATES


def state_bytes(scenario: Scenario, first_layer: int, end_layer: int, degree: int = 1) -> int:
    """Return the bytes of parameters, gradients and optimizer state of layers ``first_layer`` to ``end_layer - 1``.

    With tensor parallelism of a ``degree``, those of one of the devices that share each layer.
    """
    copies = 2 + OPTIMIZER_STATES[scenario.training.optimizer.name]
    return copies * scenario.model.at_degree(degree).parameter_bytes(first_layer, end_layer)


def saved_activation_bytes(scenario: Scenario, stage: Stage, degree: int = 1) -> int:
    """Return the bytes of one sample that a stage keeps on a device from its forward to its backward."""
    if not stage.recompute:
        return scenario.model.at_degree(degree).activation_bytes(stage.first_layer, stage.end_layer)
    return scenario.model.layers[stage.first_layer - 1].output_bytes if stage.first_layer else 0


def recomputed_bytes(scenario: Scenario, stage: Stage, degree: int = 1) -> int:
    """Return the bytes of one sample that a backward holds beyond those that were kept for it."""
    if not stage.recompute:
        return 0
    activations = scenario.model.at_degree(degree).activation_bytes(stage.first_layer, stage.end_layer)
    return max(0, activations - saved_activation_bytes(scenario, stage, degree))


def resident_bytes(scenario: Scenario, stage: Stage, replica: Replica, samples: int) -> int:
    """Return the bytes that each device of a replica needs for a stage beside the activations it keeps.

    States, what the framework takes, and the workspace of one backward of ``samples``; what that recomputes comes on
    top.
    """
    effects, degree = scenario.effects.memory, replica.tensor_parallel
    largest = scenario.model.at_degree(degree).largest_activation_bytes(stage.first_layer, stage.end_layer)
    workspace = round(effects.workspace_share * samples * largest)
    return effects.framework_bytes + workspace + state_bytes(scenario, stage.first_layer, stage.end_layer, degree)


def stage_bytes(scenario: Scenario, stage: Stage, samples: int, in_flight: int, degree: int = 1) -> int:
    """Return the bytes of a stage's states, and of what it keeps between forward and backward, on a device.

    Args:
        scenario: Gives the model and the optimizer.
        stage: Gives the layers, and whether they are recomputed.
        samples: Of each microbatch, on this device.
        in_flight: Microbatches for which something is kept at once.
        degree: Devices that share each layer by tensor parallelism.
    """
    states = state_bytes(scenario, stage.first_layer, stage.end_layer, degree)
    return states + in_flight * samples * saved_activation_bytes(scenario, stage, degree)
