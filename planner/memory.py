"""The memory that stages need on a device.

    peak = framework
         + (2 + optimizer values) * parameters
         + in flight * samples * activations of the stage's layers
         + workspace share * samples * activations of its largest layer

Parameters, gradients and optimizer state, plus the activations of the microbatches in flight (DeepCEE and Asteroid
count the same: K_s times the activations of one microbatch). The first and the last line are what a framework takes
on a real device, `planner.memory_effects`.
"""

from collections import defaultdict
from dataclasses import dataclass

from planner.memory_effects import MemoryEffects
from planner.plan import Plan, Stage
from planner.scenario import OPTIMIZER_STATES, Scenario
from planner.schedules import HOLD_ALL


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one stage needs on one device.

    Attributes:
        states_bytes: Parameters, gradients and optimizer state.
        kept_bytes: Activations of the microbatches in flight.
        workspace_bytes: While the backward of one layer runs.
    """

    states_bytes: int
    kept_bytes: int
    workspace_bytes: int


def state_bytes(scenario: Scenario, first_layer: int, end_layer: int, degree: int = 1) -> int:
    """Return the bytes of parameters, gradients and optimizer state of layers ``first_layer`` to ``end_layer - 1``.

    With tensor parallelism of a ``degree``, those of one of the devices that share each layer.
    """
    copies = 2 + OPTIMIZER_STATES[scenario.training.optimizer.name]
    return copies * scenario.model.at_degree(degree).parameter_bytes(first_layer, end_layer)


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


def peak_bytes(plan: Plan, scenario: Scenario, effects: MemoryEffects) -> dict[str, int]:
    """Return the bytes that each device of a plan needs at the peak of a step.

    The partners of a tensor-parallel group need what its first device does, which stands for them. A device that
    holds several stages runs the backward of one layer at a time.
    """
    parts: defaultdict[str, list[StageMemory]] = defaultdict(list)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            held = len(pipeline.microbatches)
            if plan.schedule not in HOLD_ALL:
                held = min(stage.in_flight, held)
            for index, samples in enumerate(stage.most_samples(pipeline.microbatches)):
                parts[stage.replicas[index].device].append(
                    _stage_memory(scenario, stage, index, samples, held, effects.workspace_share)
                )
    return {
        device: effects.framework_bytes
        + sum(part.states_bytes + part.kept_bytes for part in stages)
        + max(part.workspace_bytes for part in stages)
        for device, stages in parts.items()
    }


def _stage_memory(
    scenario: Scenario, stage: Stage, replica: int, samples: int, held: int, workspace_share: float
) -> StageMemory:
    degree = stage.replicas[replica].tensor_parallel
    model = scenario.model.at_degree(degree)
    largest = model.largest_activation_bytes(stage.first_layer, stage.end_layer)
    return StageMemory(
        state_bytes(scenario, stage.first_layer, stage.end_layer, degree),
        held * samples * model.activation_bytes(stage.first_layer, stage.end_layer),
        round(workspace_share * samples * largest),
    )
