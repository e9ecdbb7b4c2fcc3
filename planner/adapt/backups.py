"""Where the state of stages that stand on one device alone is kept a second time (Asteroid, section 2 of its design).

The backup of a stage is on the first device of the next stage, that of the last stage on the first device of the first.
A stage with several replicas needs none, nor do layers that another pipeline holds too.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from planner.adapt.migration import LayerTransfer, state_bytes
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


def backup_holders(plan: Plan) -> Mapping[int, tuple[str, ...]]:
    """Return layer to the devices that keep a copy of its state; only those layers that need one.

    A pipeline of one stage on one device has no neighbour to keep a copy: nothing saves it.
    """
    copies: Counter[int] = Counter()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            copies.update({layer: len(stage.replicas) for layer in stage.layers})
    holders: dict[int, tuple[str, ...]] = {}
    for pipeline in plan.pipelines:
        for index, stage in enumerate(pipeline.stages):
            neighbour = pipeline.stages[(index + 1) % len(pipeline.stages)].replicas[0].device
            if neighbour not in {device for replica in stage.replicas for device in replica.devices}:
                alone = (layer for layer in stage.layers if copies[layer] == 1)
                holders |= dict.fromkeys(alone, (neighbour,))
    return holders


def backup_moves(plan: Plan, scenario: Scenario) -> tuple[LayerTransfer, ...]:
    """Return what travels so that all backups of a plan are as new as the layers, in an order that all agree on."""
    owners = {
        layer: replica.device
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        for layer in stage.layers
    }
    copies = sorted(backup_holders(plan).items())
    wanted = [(owners[layer], holder, layer) for layer, holders in copies for holder in holders]
    moves = []
    for (source, target, _), run in groupby(enumerate(wanted), lambda each: (*each[1][:2], each[1][2] - each[0])):
        layers = [layer for _, (_, _, layer) in run]
        first, end = layers[0], layers[-1] + 1
        moves.append(LayerTransfer(source, target, first, end, state_bytes(scenario, first, end)))
    return tuple(moves)
