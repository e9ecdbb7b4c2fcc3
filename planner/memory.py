"""The memory that a stage needs on a device.

Parameters, gradients and optimizer state, plus the activations of the microbatches in flight
(DeepCEE and Asteroid count the same: K_s times the activations of one microbatch).
"""

from planner.scenario import OPTIMIZER_STATES, Scenario


def state_bytes(scenario: Scenario, first_layer: int, end_layer: int) -> int:
    """Return the bytes of parameters, gradients and optimizer state of layers ``first_layer`` to ``end_layer - 1``."""
    copies = 2 + OPTIMIZER_STATES[scenario.training.optimizer.name]
    return copies * scenario.model.parameter_bytes(first_layer, end_layer)


def stage_bytes(scenario: Scenario, first_layer: int, end_layer: int, samples: int, in_flight: int) -> int:
    """Return the bytes that a device needs for these layers.

    Args:
        scenario: Gives the model and the optimizer.
        first_layer: Index of the first layer.
        end_layer: Index after the last layer.
        samples: Of each microbatch, on this device.
        in_flight: Microbatches whose activations are held at once.
    """
    activations = scenario.model.activation_bytes(first_layer, end_layer)
    return state_bytes(scenario, first_layer, end_layer) + in_flight * samples * activations
