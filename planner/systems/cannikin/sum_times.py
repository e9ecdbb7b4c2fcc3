"""What the sums of a data-parallel step's gradients take on steady paths, bucket by bucket."""

from collections.abc import Callable, Sequence

from planner.cost.allreduce import GradientSync, gradient_syncs
from planner.cost.collectives import Exchange
from planner.cost.steady_path import ConstantRatePath
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.node_speeds import SumTimes


def sum_times(plan: Plan, scenario: Scenario, path: Callable[[str, str], ConstantRatePath]) -> SumTimes:
    """Return T_o, T_u and gamma of a plan of one stage.

    Gamma depends a little on device and samples; it is the mean over the devices that have samples, each at its own
    part of the largest microbatch.

    Args:
        plan: One pipeline of one stage.
        scenario: What it is for.
        path: The path from one device to another.
    """
    syncs = gradient_syncs(plan, scenario)
    if not syncs:
        return SumTimes(1.0, 0.0, 0.0)
    element_bytes = scenario.training.element_bytes
    times_s = [sum_time_s(sync, element_bytes, path) for sync in syncs]
    if not plan.synchronisation.bucket_bytes:
        return SumTimes(1.0, 0.0, sum(times_s))
    share = _first_bucket_share(syncs[0].first_layer, plan, scenario) if len(syncs) > 1 else 1.0
    return SumTimes(share, sum(times_s[:-1]), times_s[-1])


def sum_time_s(sync: GradientSync, element_bytes: int, path: Callable[[str, str], ConstantRatePath]) -> float:
    """Return how long a sum takes when all its devices begin at once: each round as long as its slowest message."""
    rounds: dict[int, float] = {}
    for device in sync.devices:
        for exchange in sync.exchanges(device):
            if exchange.send_to is not None:
                took_s = _message_s(sync, device, exchange, element_bytes, path)
                rounds[exchange.round] = max(rounds.get(exchange.round, 0.0), took_s)
    return sum(rounds.values())


def _message_s(
    sync: GradientSync,
    device: str,
    exchange: Exchange,
    element_bytes: int,
    path: Callable[[str, str], ConstantRatePath],
) -> float:
    assert exchange.send_to is not None
    way = path(device, sync.devices[exchange.send_to])
    size_bytes = exchange.send_elements * element_bytes
    return way.transmission_s(size_bytes) + way.propagation_s(size_bytes)


def _first_bucket_share(first_layer: int, plan: Plan, scenario: Scenario) -> float:
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    shares: list[float] = []
    for replica, samples in zip(stage.replicas, stage.most_samples(pipeline.microbatches), strict=True):
        kind = scenario.cluster.by_name[replica.device].kind
        whole_s = scenario.model.times(stage.first_layer, stage.end_layer, kind, samples).backward_s
        if whole_s > 0:
            shares.append(scenario.model.times(first_layer, stage.end_layer, kind, samples).backward_s / whole_s)
    return _mean(shares)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 1.0
