"""The memory that stages need on a device.

    peak = framework
         + (2 + optimizer values) * parameters
         + in flight * samples * activations of the stage's layers
         + workspace share * samples * activations of its largest layer

Parameters, gradients and optimizer state, plus the activations of the microbatches in flight (DeepCEE and Asteroid
count the same: K_s times the activations of one microbatch). The first and the last line are what a framework takes
on a real device, `planner.memory_effects`. `planner.memory_use` follows the order of actions instead.
"""

from planner.plan import Replica, Stage
from planner.scenario import OPTIMIZER_STATES, Scenario


def state_bytes(scenario: Scenario, first_layer: int, end_layer: int, degree: int = 1) -> int:
    """Return the bytes of parameters, gradients and optimizer state of layers ``first_layer`` to ``end_layer - 1``.

    With tensor parallelism of a ``degree``, those of one of the devices that share each layer.
    """
    copies = 2 + OPTIMIZER_STATES[scenario.training.optimizer.name]
    return copies * scenario.model.at_degree(degree).parameter_bytes(first_layer, end_layer)


def standing_bytes(scenario: Scenario, stage: Stage, replica: Replica, samples: int) -> int:
    """Return the bytes that each device of a replica needs for a stage beside the activations it keeps.

    States, what the framework takes, and the workspace of one backward of ``samples``.
    """
    effects, degree = scenario.effects.memory, replica.tensor_parallel
    largest = scenario.model.at_degree(degree).largest_activation_bytes(stage.first_layer, stage.end_layer)
    workspace = round(effects.workspace_share * samples * largest)
    return effects.framework_bytes + workspace + state_bytes(scenario, stage.first_layer, stage.end_layer, degree)


def stage_bytes(
    scenario: Scenario, first_layer: int, end_layer: int, samples: int, in_flight: int, degree: int = 1
) -> int:
    """Return the bytes that the tensors of these layers need on a device, without what a framework takes.

    Args:
        scenario: Gives the model and the optimizer.
        first_layer: Index of the first layer.
        end_layer: Index after the last layer.
        samples: Of each microbatch, on this device.
        in_flight: Microbatches whose activations are held at once.
        degree: Devices that share each layer by tensor parallelism.
    """
    activations = scenario.model.at_degree(degree).activation_bytes(first_layer, end_layer)
    return state_bytes(scenario, first_layer, end_layer, degree) + in_flight * samples * activations
