"""Scenarios and plans made by hand for the fidelity bench: pipelines across regions, and one pipeline per region."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.benches.fidelity.case import STEPS, Case
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training
from traces.trace import LinkTrace

# Rate and one-way latency of the network inside a region.
_LOCAL = (1e9, 0.0005)

Rate = float | LinkTrace
"""Rate of a link in bits per second, or its trace."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The model and the devices of pipelines with each stage in its own region.

    Attributes:
        forward_s: Forward time of one sample in each stage, seconds; the input gradient takes as long, the weight
            gradient 0.8 times as long.
        links: Rate, and one-way latency in seconds, between the regions of neighbouring stages.
        shares: Shares of the samples that each stage's replicas take; None for one replica in each stage.
        layers: Number of equal layers of a stage.
        output_bytes: Bytes of one sample between two stages.
        parameter_bytes: Bytes of the parameters of a stage.
        slower: Factor by which each further device of a region is slower than the previous one.
        pipelines: Number of pipelines, which share the links between the regions; their devices are equally fast.
    """

    forward_s: Sequence[float]
    links: Sequence[tuple[Rate, float]]
    shares: Sequence[Sequence[float]] | None = None
    layers: int = 1
    output_bytes: int = 500_000
    parameter_bytes: int = 400_000
    slower: float = 1.5
    pipelines: int = 1

    @property
    def stage_shares(self) -> Sequence[Sequence[float]]:
        """Shares of the replicas of each stage."""
        return self.shares or [[1.0]] * len(self.forward_s)


def pipeline_case(
    scenario_name: str,
    variant: str,
    stages: Stages,
    microbatches: tuple[int, ...],
    depths: Sequence[int],
    schedule: str,
    *,
    steps: int = STEPS,
    **options: Any,
) -> Case:
    """Return a case of pipelines across regions, named by its scenario and a variant of the plan.

    ``microbatches`` are those of each pipeline; ``options`` are further fields of the plan, such as ``order``.
    """
    scenario = _across_regions(scenario_name, stages, stages.pipelines * sum(microbatches))
    layers = stages.layers
    pipelines = []
    for number in range(stages.pipelines):
        built = tuple(
            Stage(
                index * layers,
                (index + 1) * layers,
                tuple(Replica(_device(index, number, place), share) for place, share in enumerate(shares)),
                depth,
            )
            for index, (shares, depth) in enumerate(zip(stages.stage_shares, depths, strict=True))
        )
        pipelines.append(Pipeline(built, microbatches))
    plan = Plan(scenario_name, scenario.model.name, "by hand", schedule, tuple(pipelines), **options)
    return Case(f"{scenario_name}-{variant}", scenario, plan, steps=steps)


def _across_regions(name: str, stages: Stages, batch: int) -> Scenario:
    slowness = {}
    devices = []
    for index, shares in enumerate(stages.stage_shares):
        for number in range(stages.pipelines):
            for place in range(len(shares)):
                kind = f"kind-{place}"
                slowness[kind] = stages.slower**place
                devices.append(Device(_device(index, number, place), kind, _region(index), 2**36))
    layers = tuple(
        LayerProfile(
            f"layer-{index}-{number}",
            stages.parameter_bytes // stages.layers,
            stages.output_bytes,
            stages.output_bytes,
            {kind: time_table(factor * forward_s / stages.layers) for kind, factor in slowness.items()},
        )
        for index, forward_s in enumerate(stages.forward_s)
        for number in range(stages.layers)
    )
    links = [Link(_region(index), _region(index), *_LOCAL) for index in range(len(stages.forward_s))]
    for index, (rate, latency_s) in enumerate(stages.links):
        links += both_ways(_region(index), _region(index + 1), rate, latency_s)
    return Scenario(name, Cluster(tuple(devices), tuple(links)), ModelProfile(name, layers), Training(batch))


def _device(stage: int, pipeline: int, place: int) -> str:
    return f"gpu-{stage}-{pipeline}-{place}"


def _region(index: int) -> str:
    return f"region-{index}"


def both_ways(one: str, other: str, rate: Rate, latency_s: float) -> list[Link]:
    """Return the links between two regions, one for each direction."""
    bandwidth_bps, trace = (rate.mean_bps, rate) if isinstance(rate, LinkTrace) else (rate, None)
    return [Link(a, b, bandwidth_bps, latency_s, trace) for a, b in ((one, other), (other, one))]


def time_table(forward_s: float) -> TimeTable:
    """Return the times of a layer whose forward of one sample takes ``forward_s`` seconds."""
    return TimeTable((1,), (forward_s,), (forward_s,), (0.8 * forward_s,))


def on_links(case: Case, jitter_s: float = 0.0, loss: float = 0.0) -> Case:
    """Return the case with packet jitter and loss on the links between regions."""
    links = tuple(
        link if link.source == link.target else replace(link, jitter_s=jitter_s, loss=loss)
        for link in case.scenario.cluster.links
    )
    cluster = Cluster(case.scenario.cluster.devices, links)
    return replace(case, scenario=replace(case.scenario, cluster=cluster))


@dataclass(frozen=True, slots=True)
class Regions:
    """Regions that each train the whole model, and exchange gradients or parameters.

    Attributes:
        devices: Number of devices in each region; each is a pipeline of one stage.
        samples: Samples of each device in a step.
        forward_s: Forward time of one sample on the first device, seconds; each further device takes a quarter of it
            longer.
        rate: Rate between any two regions.
        latency_s: One-way latency between any two regions, seconds.
        parameter_bytes: Bytes of the parameters of the model, and of its gradients.
        layers: Number of equal layers.
    """

    devices: Sequence[int]
    samples: Sequence[int]
    forward_s: float
    rate: Rate
    latency_s: float = 0.02
    parameter_bytes: int = 3_000_000
    layers: int = 1


def regions_case(
    scenario_name: str, variant: str, regions: Regions, how: Synchronisation, *, steps: int = STEPS
) -> Case:
    """Return a case of regions that exchange updates as ``how`` says."""
    places = [region for region, count in enumerate(regions.devices) for _ in range(count)]
    devices = tuple(Device(f"gpu-{n}", f"kind-{n}", _region(place), 2**36) for n, place in enumerate(places))
    times = {
        device.kind: time_table(regions.forward_s / regions.layers * (1 + 0.25 * number))
        for number, device in enumerate(devices)
    }
    links = [Link(_region(index), _region(index), *_LOCAL) for index in range(len(regions.devices))]
    for one in range(len(regions.devices)):
        for other in range(one):
            links += both_ways(_region(other), _region(one), regions.rate, regions.latency_s)
    layer = LayerProfile("layer", regions.parameter_bytes // regions.layers, 1000, 1000, times)
    model = ModelProfile(scenario_name, (layer,) * regions.layers)
    cluster = Cluster(devices, tuple(links))
    scenario = Scenario(scenario_name, cluster, model, Training(sum(regions.samples)))
    built = tuple(
        Pipeline((Stage(0, regions.layers, (Replica(device.name),), 1),), (samples,))
        for device, samples in zip(devices, regions.samples, strict=True)
    )
    plan = Plan(scenario_name, model.name, "by hand", "1f1b", built, synchronisation=how)
    return Case(f"{scenario_name}-{variant}", scenario, plan, steps=steps)


def with_syncer(case: Case, rate: Rate = 200e6, latency_s: float = 0.01) -> Case:
    """Return the case with a further region, whose device takes the outer steps of ``diloco-decoupled``."""
    scenario, how = case.scenario, case.plan.synchronisation
    cluster, region, name = scenario.cluster, "hub", "syncer"
    regions = dict.fromkeys(device.region for device in cluster.devices)
    links = [link for each in regions for link in both_ways(each, region, rate, latency_s)]
    device = Device(name, cluster.devices[0].kind, region, 2**36)
    wider = Cluster((*cluster.devices, device), (*cluster.links, Link(region, region, *_LOCAL), *links))
    plan = replace(case.plan, synchronisation=replace(how, outer=replace(how.outer, syncers=(name,))))
    return replace(case, scenario=replace(scenario, cluster=wider), plan=plan)
