"""What each stage of a pipeline would make of every range of layers, for `planner.systems.deepcee.layer_split`."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.link_sharing import crossing_flows, ring_flows, seconds_per_byte
from planner.cost.memory import state_bytes
from planner.cost.network import nominal_path
from planner.plan.plan import Replica, Stage
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.systems.deepcee.layer_split import Floats, Ints, SplitProblem

Replicas = tuple[Replica, ...]


def split_problem(scenario: Scenario, devices: Sequence[Replicas], microbatches: Sequence[int]) -> SplitProblem:
    """Return the costs of stages on these devices, in this order, at declared bandwidths.

    A stage is as slow as its slowest replica; flows that start together share links.

    Args:
        scenario: Gives times, sizes, memory and links.
        devices: Those of each stage, with their shares.
        microbatches: Samples of each; costs are those of the largest.
    """
    samples, layers = max(microbatches), len(scenario.model.layers)
    stages = [Stage(0, layers, replicas, in_flight=1) for replicas in devices]
    crossings = [_crossing(left, right, samples, scenario) for left, right in pairwise(stages)]
    output_bytes = np.array([0, *(layer.output_bytes for layer in scenario.model.layers)], np.float64)
    return SplitProblem(
        np.array([_compute_s(stage, samples, scenario) for stage in stages]),
        np.array([_sync_s(stage, scenario) for stage in stages]),
        np.array([_room(stage, microbatches, scenario) for stage in stages]),
        np.array([samples * byte_s * output_bytes for byte_s, _ in crossings]).reshape(-1, layers + 1),
        np.array([latency_s for _, latency_s in crossings]),
        len(microbatches),
    )


def _crossing(left: Stage, right: Stage, samples: int, scenario: Scenario) -> tuple[float, float]:
    """Seconds for each byte of a microbatch, and the latency, of the worse direction."""
    ways = [crossing_flows(left, right, samples), crossing_flows(right, left, samples)]
    latency_s = max((nominal_path(scenario, *pair).propagation_s(1) for flows in ways for pair in flows), default=0.0)
    return max(seconds_per_byte(flows, scenario) for flows in ways), latency_s


def _compute_s(stage: Stage, samples: int, scenario: Scenario) -> Floats:
    slowest_s = np.zeros(_shape(scenario))
    for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True):
        kind = scenario.cluster.by_name[replica.device].kind
        until_s = _time_until_s(scenario.model, kind, end - first)
        slowest_s = np.maximum(slowest_s, until_s[None, :] - until_s[:, None])
    slowest_s += 2 * scenario.effects.compute.launch_overhead_s
    return np.where(_is_range(scenario), slowest_s, np.inf)


def _sync_s(stage: Stage, scenario: Scenario) -> Floats:
    """A ring's time: every step moves a part over every link and takes its latency."""
    flows = ring_flows([replica.device for replica in stage.replicas])
    if not flows:
        return np.zeros(_shape(scenario))
    latency_s = 2 * (len(flows) - 1) * max(nominal_path(scenario, *pair).latency_s for pair in flows)
    until = _bytes_until(scenario.model)[0]
    return np.asarray(seconds_per_byte(flows, scenario) * (until[None, :] - until[:, None]) + latency_s, np.float64)


def _room(stage: Stage, microbatches: Sequence[int], scenario: Scenario) -> Ints:
    parameters, activations = _bytes_until(scenario.model)
    states = state_bytes(scenario, 0, len(scenario.model.layers)) / max(1.0, parameters[-1])
    effects = scenario.effects.memory
    room = np.full(_shape(scenario), len(microbatches), np.int64)
    for replica, samples in zip(stage.replicas, stage.most_samples(microbatches), strict=True):
        free = np.full(
            room.shape, scenario.cluster.by_name[replica.device].memory_bytes - effects.framework_bytes, float
        )
        free -= states * (parameters[None, :] - parameters[:, None])
        free -= np.ceil(effects.workspace_share * samples * _largest_activations(scenario.model))
        each = samples * (activations[None, :] - activations[:, None])
        fits = np.where(each > 0, free // np.maximum(each, 1.0), len(microbatches))
        room = np.minimum(room, np.where(free >= 0, fits, 0).astype(np.int64))
    return np.where(_is_range(scenario), room, 0)


def _shape(scenario: Scenario) -> tuple[int, int]:
    return (len(scenario.model.layers) + 1,) * 2


def _is_range(scenario: Scenario) -> NDArray[np.bool_]:
    return np.triu(np.ones(_shape(scenario), np.bool_), 1)


@lru_cache(maxsize=1024)
def _time_until_s(model: ModelProfile, kind: str, samples: int) -> Floats:
    each_s = [model.times(index, index + 1, kind, samples).total_s for index in range(len(model.layers))]
    return np.concatenate(([0.0], np.cumsum(each_s)))


@lru_cache(maxsize=64)
def _bytes_until(model: ModelProfile) -> tuple[Floats, Floats]:
    """Bytes of parameters, and of activations of a sample, of the layers before each one."""
    parameters = [layer.parameter_bytes for layer in model.layers]
    activations = [layer.activation_bytes for layer in model.layers]
    return np.cumsum([0.0, *parameters]), np.cumsum([0.0, *activations])


@lru_cache(maxsize=64)
def _largest_activations(model: ModelProfile) -> Floats:
    """The most bytes that one layer of each range keeps for a sample."""
    each = np.array([layer.activation_bytes for layer in model.layers], np.float64)
    rows = [np.concatenate((np.zeros(first + 1), np.maximum.accumulate(each[first:]))) for first in range(len(each))]
    return np.array([*rows, np.zeros(len(each) + 1)])


def relative_shares(times_s: dict[str, float]) -> Replicas:
    """Return devices as replicas whose shares are their speeds relative to the fastest.

    Args:
        times_s: Device to the seconds it takes for the same work.
    """
    least_s = min(times_s.values())
    return tuple(Replica(name, least_s / each if each else 1.0) for name, each in times_s.items())
