"""What a step of a plan demands of each stage, of transfers between stages, and of each link."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.cost.network import payload_bps
from planner.explain.sensitivity import Sensitivity
from planner.plan.plan import (
    Pipeline,
    equivalent_pipelines,
)
from planner.scenario.scenario import (
    Ends,
    ends_of,
)
from planner.step.evaluate import message_times, nominal_paths
from planner.step.graph import Flags
from planner.step.memory import peak_bytes
from planner.step.tables import SYNC


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What a step demands of a stage.

    Attributes:
        devices: Names of the devices that hold the stage.
        first_layer: Index of its first layer.
        end_layer: Index after its last layer.
        compute_s: Compute time of its slowest replica, seconds.
        idle_share: Share of the step in which its busiest replica is idle, other stages that it holds counted as work.
        memory_bytes: Peak bytes on the fullest of its devices, relative to capacity.
        capacity_bytes: Memory of that device, bytes.
        in_flight: Number of microbatches between forward and backward.
        hiding_depth: Number of microbatches in flight that would hide its round trips.
    """

    devices: tuple[str, ...]
    first_layer: int
    end_layer: int
    compute_s: float
    idle_share: float
    memory_bytes: int
    capacity_bytes: int
    in_flight: int
    hiding_depth: int

    @property
    def memory_share(self) -> float:
        """Share of the capacity that the peak takes."""
        return self.memory_bytes / self.capacity_bytes


@dataclass(frozen=True, slots=True)
class BoundaryLoad:
    """What a step demands of the path from one stage to the next, or back.

    Attributes:
        source_stage: Index of the stage that sends.
        target_stage: Index of the stage that receives.
        source: Device that sends, of the busiest pair.
        target: Device that receives, of the busiest pair.
        busy_share: Share of the step for which transfers keep that pair's path busy.
        latency_s: Longest one-way latency of that pair's transfers, seconds.
    """

    source_stage: int
    target_stage: int
    source: str
    target: str
    busy_share: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class PipelineLoads:
    """What a step demands of equivalent pipelines.

    Attributes:
        pipelines: Indices of the pipelines in the plan; the figures are those of the first.
        stages: Load of each stage, in order.
        boundaries: Load of transfers between stages, in order of the stage that sends.
    """

    pipelines: tuple[int, ...]
    stages: tuple[StageLoad, ...]
    boundaries: tuple[BoundaryLoad, ...]


def pipeline_loads(of: Sensitivity) -> tuple[PipelineLoads, ...]:
    """Return what a step demands of each kind of pipeline."""
    peaks, hiding = peak_bytes(of.plan, of.scenario), of.hiding_plan()
    loads = []
    for group in equivalent_pipelines(of.plan, of.scenario):
        deep = hiding.pipelines[group[0]]
        stages = tuple(_stage_load(of, group[0], index, deep, peaks) for index in range(len(deep.stages)))
        loads.append(PipelineLoads(tuple(group), stages, _boundaries(of, group[0])))
    return tuple(loads)


def link_busy_shares(of: Sensitivity, sums: bool) -> dict[Ends, float]:
    """Return the share of the step for which each link is busy, in the busier direction.

    It may exceed 1 where flows share a link that the evaluator gives to each of them alone.

    Args:
        of: Step to look at.
        sums: Whether to count sums of gradients, or transfers between stages.
    """
    step = of.step
    own = of.is_sum == sums
    size_bytes = np.bincount(
        step.graph.channel[own], step.messages.size_bytes[own], minlength=len(step.graph.channel_sender)
    )
    busy_s: defaultdict[tuple[str, str], float] = defaultdict(float)
    for channel in np.flatnonzero(size_bytes).tolist():
        ends = (step.actors[int(side[channel])] for side in (step.graph.channel_sender, step.graph.channel_receiver))
        for link in of.scenario.cluster.path(*ends):
            rate_bps = payload_bps(of.scenario.effects.network, link.bandwidth_bps)
            busy_s[link.source, link.target] += 8 * float(size_bytes[channel]) / rate_bps
    shares: dict[Ends, float] = {}
    for (source, target), each_s in busy_s.items():
        ends_key = frozenset((source, target))
        shares[ends_key] = max(shares.get(ends_key, 0.0), each_s / of.step_s if of.step_s else 0.0)
    return shares


def longest_latency_link(of: Sensitivity) -> Ends | None:
    """Return the link of the longest latency on paths between stages; None if there are none."""
    links = [
        link
        for pipeline in of.plan.pipelines
        for left, right in pairwise(pipeline.stages)
        for link in of.scenario.cluster.path(left.replicas[0].device, right.replicas[0].device)
    ]
    return ends_of(max(links, key=lambda link: link.latency_s)) if links else None


def _stage_load(of: Sensitivity, pipeline: int, index: int, deep: Pipeline, peaks: dict[str, int]) -> StageLoad:
    stage = of.plan.pipelines[pipeline].stages[index]
    actions, names = of.step.actions, np.array(of.step.actors)
    computing = actions.kind != SYNC
    own = computing & (actions.pipeline == pipeline) & (actions.stage == index)
    compute_s, busy_s = [], []
    fullest: list[tuple[float, int, int]] = []
    for replica in stage.replicas:
        acting = (names == replica.device)[actions.actor]
        compute_s.append(float(actions.duration_s[own & acting].sum()))
        busy_s.append(float(actions.duration_s[computing & acting].sum()))
        capacity = min(of.scenario.cluster.by_name[device].memory_bytes for device in replica.devices)
        fullest.append((peaks[replica.device] / capacity, peaks[replica.device], capacity))
    _, memory_bytes, capacity_bytes = max(fullest)
    return StageLoad(
        tuple(device for replica in stage.replicas for device in replica.devices),
        stage.first_layer,
        stage.end_layer,
        max(compute_s),
        max(0.0, 1 - max(busy_s) / of.step_s) if of.step_s else 0.0,
        memory_bytes,
        capacity_bytes,
        stage.in_flight,
        deep.stages[index].in_flight,
    )


def _boundaries(of: Sensitivity, pipeline: int) -> tuple[BoundaryLoad, ...]:
    step, messages = of.step, of.step.messages
    transmission_s, latency_s = message_times(step, nominal_paths(of.plan, of.scenario))
    # What a stage hands its own sums of gradients stays on its device.
    between_stages = ~of.is_sum & (step.actions.kind[messages.receiver] != SYNC)
    own = between_stages & (step.actions.pipeline[messages.sender] == pipeline)
    found: dict[tuple[int, int], BoundaryLoad] = {}
    for channel in np.unique(step.graph.channel[own]).tolist():
        ends = [step.actors[int(side[channel])] for side in (step.graph.channel_sender, step.graph.channel_receiver)]
        on_it = own & (step.graph.channel == channel)
        for between in _stage_pairs(of, on_it):
            some = on_it & (step.actions.stage[messages.sender] == between[0])
            some &= step.actions.stage[messages.receiver] == between[1]
            busy_share = float(transmission_s[some].sum()) / of.step_s if of.step_s else 0.0
            load = BoundaryLoad(*between, ends[0], ends[1], busy_share, float(latency_s[some].max()))
            if between not in found or busy_share > found[between].busy_share:
                found[between] = load
    return tuple(found[between] for between in sorted(found))


def _stage_pairs(of: Sensitivity, chosen: Flags) -> set[tuple[int, int]]:
    actions, messages = of.step.actions, of.step.messages
    senders = actions.stage[messages.sender[chosen]].tolist()
    receivers = actions.stage[messages.receiver[chosen]].tolist()
    return set(zip(senders, receivers, strict=True))
