"""Two devices in two regions and a model cut in the middle: the smallest pipeline over a wide-area link."""

from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import ModelCode, Optimizer, Scenario, Training

DEVICES = ("west", "east")


def two_stage_scenario(
    action_s: float, transfer_bytes: int, microbatches: int, bandwidth_bps: float, latency_s: float
) -> Scenario:
    """Return a scenario in which forward, input gradient and weight gradient of a microbatch take equally long.

    Args:
        action_s: Seconds of each, on either device.
        transfer_bytes: Of an activation, and of its gradient.
        microbatches: Of one sample each.
        bandwidth_bps: Each way.
        latency_s: One way.
    """
    table = TimeTable((1,), (action_s,), (action_s,), (action_s,))
    layers = tuple(
        LayerProfile(f"layer-{n}", 4, transfer_bytes, transfer_bytes, dict.fromkeys(DEVICES, table)) for n in range(2)
    )
    return Scenario(
        "two-stages",
        _cluster(bandwidth_bps, latency_s),
        ModelProfile("two-layers", layers),
        Training(microbatches, microbatch=1),
    )


def trained_scenario(model: ModelProfile, code: ModelCode, samples: int, rule: Optimizer) -> Scenario:
    """Return a scenario that trains a model on two devices over links that nobody emulates.

    Args:
        model: Its sizes.
        code: Of the model.
        samples: Of a step.
        rule: How parameters are updated.
    """
    return Scenario("two-stages", _cluster(1e9, 0.0), model, Training(samples, optimizer=rule), code)


def two_stage_plan(
    scenario: Scenario, schedule: str, microbatches: tuple[int, ...], in_flight: tuple[int, int], order: str
) -> Plan:
    """Return a plan that cuts the model in the middle."""
    layers = len(scenario.model.layers)
    middle = (layers + 1) // 2
    bounds = ((0, middle), (middle, layers))
    stages = tuple(
        Stage(*layers, (Replica(device),), depth)
        for layers, device, depth in zip(bounds, DEVICES, in_flight, strict=True)
    )
    return Plan(scenario.name, scenario.model.name, "by hand", schedule, (Pipeline(stages, microbatches),), order=order)


def _cluster(bandwidth_bps: float, latency_s: float) -> Cluster:
    devices = tuple(Device(name, name, f"region-{name}", 2**36) for name in DEVICES)
    west, east = (device.region for device in devices)
    links = (Link(west, east, bandwidth_bps, latency_s), Link(east, west, bandwidth_bps, latency_s))
    return Cluster(devices, links)
