"""The loads of one step of a plan: compute and memory of each stage, and transfers on each path and link."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from planner.cost.device_transport import boundary_transport, group_transport
from planner.cost.network import payload_bps
from planner.explain.sensitivity import Sensitivity
from planner.plan.plan import Pipeline, equivalent_pipelines
from planner.scenario.scenario import Ends, ends_of
from planner.step.evaluate import message_times, nominal_paths
from planner.step.graph import Flags
from planner.step.memory import peak_bytes
from planner.step.tables import SYNC


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Compute, memory and depth of one stage, which holds layers ``first_layer`` to ``end_layer - 1``, in one step.

    Attributes:
        compute_s: Compute time of the stage's slowest replica in a step, seconds.
        idle_share: Share of the step in which the device of the stage's busiest replica computes neither for this stage
            nor for others.
        memory_bytes: Peak memory of the stage's fullest device, which is the device with the largest `memory_share`.
        capacity_bytes: Memory of the fullest device.
        in_flight: Limit on the microbatches between forward and backward.
        hiding_depth: Value of ``in_flight`` at which the stage would no longer wait for round trips.
        group_transport: What carries the messages of its tensor-parallel groups: ``nccl`` or ``gloo``; empty if it has
            no groups.
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
    group_transport: str = ""

    @property
    def memory_share(self) -> float:
        """Ratio of ``memory_bytes`` to ``capacity_bytes``."""
        return self.memory_bytes / self.capacity_bytes


@dataclass(frozen=True, slots=True)
class BoundaryLoad:
    """Transfers from one stage to another, between the pair of their devices whose path is busy longest.

    Attributes:
        busy_share: Share of the step for which these transfers keep the path from ``source`` to ``target`` busy.
        latency_s: Longest one-way latency of these transfers, seconds.
        transport: What carries them: ``nccl`` or ``gloo``.
        copy_out_s: Longest time for which one of them is copied to the host of ``source``, seconds.
        copy_in_s: Longest time for which one of them is copied from the host of ``target``, seconds.
    """

    source_stage: int
    target_stage: int
    source: str
    target: str
    busy_share: float
    latency_s: float
    transport: str
    copy_out_s: float
    copy_in_s: float


@dataclass(frozen=True, slots=True)
class PipelineLoads:
    """Loads of equivalent pipelines, computed for the first one.

    Attributes:
        pipelines: Indices of the pipelines in the plan.
        stages: Load of each stage, in order.
        boundaries: Loads of the transfers between stages, sorted by ``source_stage`` and ``target_stage``.
    """

    pipelines: tuple[int, ...]
    stages: tuple[StageLoad, ...]
    boundaries: tuple[BoundaryLoad, ...]


def pipeline_loads(of: Sensitivity) -> tuple[PipelineLoads, ...]:
    """Return the loads of each group of equivalent pipelines in a step."""
    peaks, hiding = peak_bytes(of.plan, of.scenario), of.hiding_plan()
    loads = []
    for group in equivalent_pipelines(of.plan, of.scenario):
        deep = hiding.pipelines[group[0]]
        stages = tuple(_stage_load(of, group[0], index, deep, peaks) for index in range(len(deep.stages)))
        loads.append(PipelineLoads(tuple(group), stages, _boundaries(of, group[0])))
    return tuple(loads)


def link_busy_shares(of: Sensitivity, sums: bool) -> dict[Ends, float]:
    """Return the share of the step for which each link is busy, in the busier of its two directions.

    With ``sums``, the messages of gradient sums count, otherwise the transfers between stages. A share may exceed 1,
    because the step time ignores that transfers of different pairs of devices slow each other down on a shared link.
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
    """Return the link with the longest latency on paths between stages; None if there are no such paths."""
    links = [
        link
        for pipeline in of.plan.pipelines
        for left, right in pairwise(pipeline.stages)
        for one, other in product(left.replicas, right.replicas)
        for ends in ((one.device, other.device), (other.device, one.device))
        for link in of.scenario.cluster.path(*ends)
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
        ", ".join(
            dict.fromkeys(group_transport(of.scenario, each.devices) for each in stage.replicas if each.partners)
        ),
    )


def _boundaries(of: Sensitivity, pipeline: int) -> tuple[BoundaryLoad, ...]:
    step, messages = of.step, of.step.messages
    transmission_s, latency_s = message_times(step, nominal_paths(of.plan, of.scenario))
    # Messages from a device's backward to its communication stream stay on the device.
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
            load = BoundaryLoad(
                *between,
                ends[0],
                ends[1],
                busy_share,
                float(latency_s[some].max()),
                boundary_transport(of.plan, of.scenario, ends[0], ends[1]),
                float(messages.copy_out_s[some].max()),
                float(messages.copy_in_s[some].max()),
            )
            if between not in found or busy_share > found[between].busy_share:
                found[between] = load
    return tuple(found[between] for between in sorted(found))


def _stage_pairs(of: Sensitivity, chosen: Flags) -> set[tuple[int, int]]:
    actions, messages = of.step.actions, of.step.messages
    senders = actions.stage[messages.sender[chosen]].tolist()
    receivers = actions.stage[messages.receiver[chosen]].tolist()
    return set(zip(senders, receivers, strict=True))
