"""Updates that pipelines send each other without waiting (asgd, asgd-ga, ma): who sends what to whom.

The first replica of a stage speaks for it, as the communicator of a region does in Cloudless-Training (arXiv
2303.05330); it passes on what it receives with the stage's own next sum of gradients.
"""

from dataclasses import dataclass

from planner.plan.plan import Plan, Stage
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class UpdateEdge:
    """Layers that two stages of different pipelines both hold.

    Attributes:
        sender: Device whose updates go out.
        receiver: Device that applies them.
        pipelines: Of sender and receiver.
        stage: The receiver's.
        layers: Index of the first one, and after the last one.
        size_bytes: Of their gradients or parameters.
    """

    sender: str
    receiver: str
    pipelines: tuple[int, int]
    stage: int
    layers: tuple[int, int]
    size_bytes: int


def update_edges(plan: Plan, scenario: Scenario) -> tuple[UpdateEdge, ...]:
    """Return who sends updates to whom; nobody where pipelines sum their gradients and wait."""
    if plan.synchronisation.method == "allreduce":
        return ()
    edges = []
    for p, own in enumerate(plan.pipelines):
        for q, other in enumerate(plan.pipelines):
            for sending in own.stages if p != q else ():
                for index, receiving in enumerate(other.stages):
                    layers = _shared_layers(sending, receiving)
                    size_bytes = _shared_bytes(scenario, sending, receiving, layers)
                    if size_bytes:
                        ends = (sending.replicas[0].device, receiving.replicas[0].device)
                        edges.append(UpdateEdge(*ends, (p, q), index, layers, size_bytes))
    return tuple(edges)


def samples_of_an_update(plan: Plan, pipeline: int) -> int:
    """Return over how many samples the gradient of a pipeline's update is a mean.

    The global batch where gradients add up to those of all pipelines; a pipeline's own samples where parameters are
    averaged, since each pipeline then trains by itself.
    """
    return plan.pipelines[pipeline].samples if plan.synchronisation.method == "ma" else plan.global_batch


def _shared_layers(one: Stage, other: Stage) -> tuple[int, int]:
    return max(one.first_layer, other.first_layer), min(one.end_layer, other.end_layer)


def _shared_bytes(scenario: Scenario, one: Stage, other: Stage, layers: tuple[int, int]) -> int:
    degree = min(one.replicas[0].tensor_parallel, other.replicas[0].tensor_parallel)
    return scenario.model.at_degree(degree).parameter_bytes(*layers) if layers[0] < layers[1] else 0
