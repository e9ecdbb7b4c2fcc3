"""Small scenarios and plans for tests, with every number chosen by the test."""

from collections.abc import Sequence

from planner.cluster import Cluster, Device, Link
from planner.plan import Pipeline, Plan, Replica, Stage
from planner.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario import Optimizer, Scenario, Training
from traces.trace import LinkTrace

GIB = 2**30


def chain_scenario(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    output_bytes: Sequence[int] | None = None,
    bandwidth_bps: float = 1e9,
    latency_s: float = 0.0,
    trace: LinkTrace | None = None,
    global_batch: int = 8,
    parameter_bytes: int = 4000,
    memory_bytes: int = GIB,
    activation_bytes: int = 1000,
) -> Scenario:
    """One layer and one device of its own kind per entry, each in its own region, neighbours linked.

    Times are those of one microbatch of one sample, proportional to samples; backward is half input, half weight
    gradient.
    """
    count = len(forward_s)
    outputs = list(output_bytes) if output_bytes is not None else [1000] * count
    kinds = [f"kind-{index}" for index in range(count)]
    layers = tuple(
        LayerProfile(
            f"layer-{index}",
            parameter_bytes,
            outputs[index],
            activation_bytes,
            {
                kind: TimeTable((1,), (forward_s[index],), (backward_s[index] / 2,), (backward_s[index] / 2,))
                for kind in kinds
            },
        )
        for index in range(count)
    )
    devices = tuple(Device(f"device-{i}", kinds[i], f"region-{i}", memory_bytes) for i in range(count))
    links = tuple(
        Link(f"region-{a}", f"region-{b}", bandwidth_bps, latency_s, trace)
        for a in range(count)
        for b in range(count)
        if a != b
    )
    training = Training(global_batch, optimizer=Optimizer("sgd"))
    return Scenario("chain", Cluster(devices, links), ModelProfile("chain", layers), training)


def chain_plan(
    scenario: Scenario,
    *,
    schedule: str = "1f1b",
    depths: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
    bounds: Sequence[int] | None = None,
) -> Plan:
    """One pipeline with a stage per device; layers cut at ``bounds``, one each if None."""
    count = len(scenario.cluster.devices)
    cuts = list(bounds) if bounds is not None else list(range(count + 1))
    stages = tuple(
        Stage(
            cuts[index],
            cuts[index + 1],
            (Replica(scenario.cluster.devices[index].name),),
            depths[index] if depths is not None else count - index,
        )
        for index in range(count)
    )
    sizes = tuple(microbatches) if microbatches is not None else (1,) * scenario.training.global_batch
    return Plan(scenario.name, scenario.model.name, "hand", schedule, (Pipeline(stages, sizes),))
