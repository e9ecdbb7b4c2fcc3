"""The ways to use a pool, and what they cost: tables for the search of chains."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.cost.memory import state_bytes
from planner.cost.network import ConstantRatePath, nominal_path
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.boundaries import crossings
from planner.systems.auto.candidates.chain_split import Floats, Options
from planner.systems.auto.candidates.device_classes import DeviceClass, StageOption
from traces.common.errors import InputError

# Replicas of a stage that are tried. More pipelines side by side do the same as more replicas, but for unlike pools:
# there a stage on one device may feed one on several.
WIDTHS = (1, 2, 3, 4)

# Stages of one pool in a row: more would hold hardly a layer each.
MOST_STAGES_OF_POOL = 12


def ways_to_use(
    pools: Sequence[DeviceClass], scenario: Scenario, pipelines: int, samples: int, recompute: bool
) -> tuple[StageOption, ...]:
    """Return the ways in which each of ``pipelines`` alike pipelines may use its part of each pool.

    Args:
        pools: In the order of the chain.
        scenario: Gives the model.
        pipelines: How many share the pools.
        samples: Of a microbatch; a replica has one at least.
        recompute: Whether stages keep only their input.
    """
    ways = []
    for pool in pools:
        for degree in _degrees(scenario, pool):
            groups = pool.group_count(degree) // pipelines
            for width in WIDTHS:
                if width <= min(samples, groups):
                    ways.append(StageOption(pool, degree, width, recompute, min(MOST_STAGES_OF_POOL, groups // width)))
    return tuple(ways)


def tabulate(
    ways: Sequence[StageOption], scenario: Scenario, pipelines: int, microbatch: int, holders_each: float
) -> Options:
    """Return what the ways cost.

    Args:
        ways: To use the pools.
        scenario: Gives model and links.
        pipelines: How many share the pools.
        microbatch: Samples.
        holders_each: For each device that holds a layer here so many do altogether, with the other pools' pipelines.
    """
    order = {pool: number for number, pool in enumerate(dict.fromkeys(way.pool for way in ways))}
    costs = [layer_costs(scenario, way.pool, way.degree, -(-microbatch // way.width), way.recompute) for way in ways]
    busy_s, way_s = crossings(ways, scenario, pipelines, microbatch)
    return Options(
        np.array([order[way.pool] for way in ways], np.int64),
        np.array([way.most_stages for way in ways], np.int64),
        np.array([cost.compute_s for cost in costs]),
        np.array([cost.state_bytes for cost in costs]),
        np.array([cost.activation_bytes for cost in costs]),
        np.array([cost.capacity_bytes for cost in costs]),
        busy_s,
        way_s,
        2.0 * scenario.effects.compute.transfers_block * way_s,
        np.array(
            [_sums_s(scenario, way.pool, way.degree, round(pipelines * way.width * holders_each)) for way in ways]
        ),
    )


def least_times_s(
    ways: Sequence[StageOption], scenario: Scenario, pipelines: int, microbatch: int
) -> tuple[float, float]:
    """Return lower bounds of the slowest stage's time for one microbatch, and of all stages' together, seconds.

    The second is that of the quickest way for every layer. The first is that of layers which may be cut at any place
    and be anywhere: with c_i(l) the device time of layer l on pool i in the best of its ways, C_i their sum and u_i the
    devices of a pipeline's part, (sum over l of min_i c_i(l) / C_i) / (sum over i of u_i / C_i) is feasible for the
    dual of that linear programme.
    """
    best: dict[DeviceClass, Floats] = {}
    alone_s = np.full(len(scenario.model.layers), np.inf)
    for way in ways:
        costs = layer_costs(scenario, way.pool, way.degree, -(-microbatch // way.width), way.recompute)
        alone_s, device_s = np.minimum(alone_s, costs.layer_s), costs.layer_s * (way.degree * way.width)
        best[way.pool] = np.minimum(best[way.pool], device_s) if way.pool in best else device_s
    sums_s = {pool: float(device_s.sum()) for pool, device_s in best.items()}
    if min(sums_s.values()) <= 0:
        return 0.0, 0.0
    shares = np.min([device_s / sums_s[pool] for pool, device_s in best.items()], axis=0)
    bottleneck_s = float(shares.sum()) / sum(pool.size // pipelines / sum_s for pool, sum_s in sums_s.items())
    return bottleneck_s, float(alone_s.sum())


def ring_s(scenario: Scenario, pool: DeviceClass, size_bytes: float, holders: int) -> float:
    """Return how long a ring of so many devices like a pool's takes to sum so many bytes of gradients, seconds."""
    if holders < 2:
        return 0.0
    path, part = _ring_path(scenario, pool), size_bytes / holders
    return 2 * (holders - 1) * (path.latency_s + (path.transmission_s(part) if part else 0.0))


@lru_cache(maxsize=4096)
def _ring_path(scenario: Scenario, pool: DeviceClass) -> ConstantRatePath:
    return nominal_path(scenario, *pool.ends)


@lru_cache(maxsize=65536)
def _sums_s(scenario: Scenario, pool: DeviceClass, degree: int, holders: int) -> Floats:
    """Seconds of the sum of all layers before one, as if the whole model were summed at once, [layers + 1]."""
    size_bytes = layer_costs(scenario, pool, degree, 1, False).parameter_bytes
    whole_bytes = float(size_bytes[-1])
    return np.asarray(size_bytes * (ring_s(scenario, pool, whole_bytes, holders) / max(whole_bytes, 1.0)))


@dataclass(frozen=True, eq=False, slots=True)
class LayerCosts:
    """What layers cost on one device, in seconds and bytes: of all before one, [layers + 1], and of each, [layers]."""

    compute_s: Floats
    state_bytes: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    capacity_bytes: float
    layer_s: Floats


@lru_cache(maxsize=256)
def _degrees(scenario: Scenario, pool: DeviceClass) -> tuple[int, ...]:
    """Degrees of tensor parallelism that the model was profiled with on the pool's kind, within a host.

    Raises:
        InputError: The profile has no times for the kind at all.
    """
    scenario.model.times(0, len(scenario.model.layers), pool.kind, 1)
    sharded = (degree for degree in sorted(scenario.model.sharded) if degree <= pool.host_size)
    return (1, *(degree for degree in sharded if _is_profiled(scenario, degree, pool.kind)))


def _is_profiled(scenario: Scenario, degree: int, kind: str) -> bool:
    try:
        scenario.model.at_degree(degree).times(0, len(scenario.model.layers), kind, 1)
    except InputError:
        return False
    return True


@lru_cache(maxsize=4096)
def layer_costs(scenario: Scenario, pool: DeviceClass, degree: int, samples: int, recompute: bool) -> LayerCosts:
    """Return what all layers before one cost on a device of a pool with so many samples of a microbatch."""
    model, effects = scenario.model.at_degree(degree), scenario.effects
    layers = range(len(model.layers))
    times = [model.times(layer, layer + 1, pool.kind, samples) for layer in layers]
    states = [state_bytes(scenario, layer, layer + 1, degree) for layer in layers]
    parameters = [layer.parameter_bytes for layer in model.layers]
    activations = [samples * layer.activation_bytes for layer in model.layers]
    capacity = pool.memory_bytes - effects.memory.framework_bytes
    capacity -= round(effects.memory.workspace_share * max(activations))
    launches_s = 3 * effects.compute.launch_overhead_s
    seconds = [each.total_s + (each.forward_s if recompute else 0.0) + launches_s / len(layers) for each in times]
    if recompute:
        # All activations of one microbatch are there while its backward runs; of the others, the stage's input.
        states = [state + activation for state, activation in zip(states, activations, strict=True)]
        activations = [0] * len(layers)
        capacity -= (
            MOST_STAGES_OF_POOL * samples * max(layer.output_bytes for layer in model.layers[:-1] or model.layers)
        )
    return LayerCosts(
        _until(seconds), _until(states), _until(activations), _until(parameters), float(capacity), np.array(seconds)
    )


def _until(values: Sequence[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.array(values, np.float64))))
