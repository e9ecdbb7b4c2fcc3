"""What a plan's tensor-parallel groups must be like to train a model."""

from collections.abc import Iterator

from planner.cost.allreduce import GradientSync, gradient_syncs
from planner.plan.plan import Plan, Replica
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


def check_groups(plan: Plan, scenario: Scenario) -> None:
    """Refuse groups whose shards cannot be brought together with those of others.

    Raises:
        InputError: With the place of the group.
    """
    where = {replica.device: f"pipelines[{p}].stages[{s}].replicas[{r}]" for p, s, r, replica in _replicas(plan)}
    groups = {replica.device: replica.devices for *_, replica in _replicas(plan)}
    first = next((where[leader] for leader, devices in groups.items() if len(devices) > 1), None)
    if first is None:
        return
    if plan.synchronisation.method != "allreduce":
        raise InputError(
            f"tensor parallelism with method '{plan.synchronisation.method}' cannot be run yet",
            where=f"{first}.partners",
            valid="leave 'partners' out, or write 'allreduce': the devices of a group would apply what arrives at "
            "different times",
        )
    if scenario.training.noise_scale:
        raise InputError(
            "the noise scale with tensor parallelism cannot be measured yet",
            where="training.noise_scale",
            valid=f"remove it, or leave 'partners' out in {first}",
        )
    for sync in gradient_syncs(plan, scenario):
        degree = len(groups[sync.devices[0]])
        for leader in sync.devices:
            if len(groups[leader]) != degree:
                raise InputError(
                    f"{len(groups[leader])} devices share layer {sync.first_layer}, {degree} do in "
                    f"{where[sync.devices[0]]}",
                    where=f"{where[leader]}.partners",
                    valid="replicas sum their gradients shard by shard: cut the layer into as many in each",
                )
        for place in range(1, degree):
            _check_paths(sync.among(groups[leader][place] for leader in sync.devices), scenario)


def _check_paths(sync: GradientSync, scenario: Scenario) -> None:
    for device in sync.devices:
        for exchange in sync.exchanges(device):
            if exchange.send_to is not None:
                scenario.cluster.path(device, sync.devices[exchange.send_to])


def _replicas(plan: Plan) -> Iterator[tuple[int, int, int, Replica]]:
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for r, replica in enumerate(stage.replicas):
                yield p, s, r, replica
