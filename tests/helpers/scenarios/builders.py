"""Small scenarios and plans for tests, with every number chosen by the test."""

from collections.abc import Callable, Sequence

from planner.events.event import EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, Training
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


def mesh_scenario(
    devices: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    output_bytes: Sequence[int] | None = None,
    link: Callable[[int, int], tuple[float, float]] = lambda a, b: (1e9, 0.0),
    trace: LinkTrace | None = None,
    global_batch: int = 8,
    parameter_bytes: Sequence[int] | None = None,
    memory_bytes: int = GIB,
    activation_bytes: int = 1000,
    microbatch: int = 0,
    regions: Sequence[str] | None = None,
) -> Scenario:
    """Any number of layers and of devices of one kind, with a link for each ordered pair.

    No two flows of different pairs share a link. Times are those of one sample and proportional to samples;
    ``link`` gives bits per second and latency in seconds from one device to another. ``regions`` are those of the
    devices; one for all of them if None.
    """
    places = regions or ["region"] * devices
    outputs = list(output_bytes) if output_bytes is not None else [1000] * len(forward_s)
    parameters = list(parameter_bytes) if parameter_bytes is not None else [4000] * len(forward_s)
    layers = tuple(
        LayerProfile(
            f"layer-{index}",
            parameters[index],
            outputs[index],
            activation_bytes,
            {"kind": TimeTable((1,), (forward_s[index],), (backward_s[index] / 2,), (backward_s[index] / 2,))},
        )
        for index in range(len(forward_s))
    )
    links = tuple(
        Link(f"device-{a}", f"device-{b}", *link(a, b), trace) for a in range(devices) for b in range(devices) if a != b
    )
    cluster = Cluster(tuple(Device(f"device-{i}", "kind", places[i], memory_bytes) for i in range(devices)), links)
    training = Training(global_batch, microbatch, Optimizer("sgd"))
    return Scenario("mesh", cluster, ModelProfile("mesh", layers), training)


def layered_plan(
    scenario: Scenario,
    pipelines: Sequence[tuple[Sequence[tuple[int, int, int]], Sequence[int]]],
    *,
    schedule: str = "1f1b",
    shares: Sequence[float] | None = None,
) -> Plan:
    """Pipelines as ((end layer, replicas, depth) of each stage, microbatches); devices are taken in order.

    ``shares`` are those of the devices, equal if None.
    """
    names = iter(scenario.cluster.devices)
    share = iter(shares if shares is not None else [1.0] * len(scenario.cluster.devices))
    made = []
    for stages, microbatches in pipelines:
        first_layer = 0
        built = []
        for end_layer, width, depth in stages:
            replicas = tuple(Replica(next(names).name, next(share)) for _ in range(width))
            built.append(Stage(first_layer, end_layer, replicas, depth))
            first_layer = end_layer
        made.append(Pipeline(tuple(built), tuple(microbatches)))
    return Plan(scenario.name, scenario.model.name, "hand", schedule, tuple(made))


def makespan_s(record: RunRecord) -> float:
    """When the last compute or gradient sum of a run ended, in seconds."""
    return max(e.end_s for e in record.events if e.kind in (EventKind.COMPUTE, EventKind.SYNC))
