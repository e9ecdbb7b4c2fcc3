"""The ways to use a pool, and what they cost: tables for the search of chains."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.cost.layers import layer_table, running_sums
from planner.cost.network import ConstantRatePath, nominal_path, payload_bps
from planner.cost.synchronisation import ring_s
from planner.scenario.scenario import Scenario
from planner.systems.auto.candidates.chain_split import Floats, Options
from planner.systems.auto.candidates.device_classes import DeviceClass, StageOption
from traces.common.errors import InputError


def boundary_costs(
    options: Sequence[StageOption], scenario: Scenario, pipelines: int, microbatch: int
) -> tuple[Floats, Floats]:
    """Return for how long each layer's output keeps the links busy, and how long it is on its way, in seconds.

    Both for each pair of ways, [ways, ways, layers]. What a host sends in each round of microbatches passes its
    interface, what a region does passes the region's links, and no link is busy for less than one message takes.

    Args:
        options: To use the device classes.
        scenario: Gives links and sizes.
        pipelines: That send at the same time.
        microbatch: Samples.
    """
    count, layers = len(options), len(scenario.model.layers)
    busy_s, way_s = np.zeros((count, count, layers)), np.zeros((count, count, layers))
    width = np.array([option.width for option in options])
    # Assumed: the stages of a host's devices are the same one, of different pipelines or replicas.
    senders = [min(pipelines * option.width, option.device_class.host_size // option.degree or 1) for option in options]
    host = np.array(senders) * -(-microbatch // width)
    places: dict[DeviceClass, list[int]] = {}
    for index, option in enumerate(options):
        places.setdefault(option.device_class, []).append(index)
    for one, rows in places.items():
        for other, columns in places.items():
            if one is other and one.size == 1:
                continue
            between = _between(scenario, one, other)
            message = -(-microbatch // np.maximum(width[rows][:, None], width[columns][None, :]))
            sizes, which = np.unique(message, return_inverse=True)
            alone_s = np.array([_message_s(scenario, one, other, size) for size in sizes.tolist()])[which]
            alone_s = alone_s.reshape(*message.shape, layers)
            shared_s = np.maximum(host[rows][:, None, None] * between.host_s, pipelines * microbatch * between.region_s)
            template = np.ix_(rows, columns)
            busy_s[template] = np.maximum(alone_s, shared_s)
            way_s[template] = alone_s + between.path.latency_s
    return busy_s, way_s


@dataclass(frozen=True, eq=False, slots=True)
class _Between:
    """The way between devices of two pools.

    Attributes:
        path: Of one message by itself.
        host_s: Seconds of a sample of each layer's output on the interfaces of hosts, [layers].
        region_s: On the links of and between regions, [layers].
    """

    path: ConstantRatePath
    host_s: Floats
    region_s: Floats


@lru_cache(maxsize=4096)
def _between(scenario: Scenario, one: DeviceClass, other: DeviceClass) -> _Between:
    source, target = one.ends[0], other.ends[1]
    cluster = scenario.cluster
    bits = 8 * np.array([layer.output_bytes for layer in scenario.model.layers], np.float64)
    host_s, region_s = np.zeros(len(bits)), np.zeros(len(bits))
    for link in cluster.path(source, target):
        seconds = bits / payload_bps(scenario.effects.network, link.bandwidth_bps)
        if "network" in (link.source, link.target):
            host_s = np.maximum(host_s, seconds)
        elif link.source in cluster.regions:
            region_s = np.maximum(region_s, seconds)
    return _Between(nominal_path(scenario, source, target), host_s, region_s)


@lru_cache(maxsize=16384)
def _message_s(scenario: Scenario, one: DeviceClass, other: DeviceClass, samples: int) -> Floats:
    """Seconds for which each layer's output of so many samples keeps an idle path busy, [layers]."""
    path = _between(scenario, one, other).path
    sizes, which = np.unique(
        samples * np.array([layer.output_bytes for layer in scenario.model.layers]), return_inverse=True
    )
    return np.array([path.transmission_s(size) for size in sizes.tolist()])[which]


# Replicas of a stage that are tried. More pipelines side by side do the same as more replicas, but for unlike pools:
# there a stage on one device may feed one on several.
WIDTHS = (1, 2, 3, 4)

# Stages of one pool in a row: more would hold hardly a layer each.
MOST_STAGES_OF_CLASS = 12


def stage_options(
    device_classes: Sequence[DeviceClass], scenario: Scenario, pipelines: int, samples: int, recompute: bool
) -> tuple[StageOption, ...]:
    """Return the ways in which each of ``pipelines`` alike pipelines may use its part of each pool.

    Args:
        device_classes: In the order of the chain.
        scenario: Gives the model.
        pipelines: How many share the pools.
        samples: Of a microbatch; a replica has one at least.
        recompute: Whether stages keep only their input.
    """
    options = []
    for device_class in device_classes:
        for degree in _degrees(scenario, device_class):
            groups = device_class.group_count(degree) // pipelines
            for width in WIDTHS:
                if width <= min(samples, groups):
                    options.append(
                        StageOption(device_class, degree, width, recompute, min(MOST_STAGES_OF_CLASS, groups // width))
                    )
    return tuple(options)


def option_costs(
    options: Sequence[StageOption], scenario: Scenario, pipelines: int, microbatch: int, holders_each: float
) -> Options:
    """Return what the ways cost.

    Args:
        options: To use the device classes.
        scenario: Gives model and links.
        pipelines: How many share the pools.
        microbatch: Samples.
        holders_each: For each device that holds a layer here so many do altogether, with the other pools' pipelines.
    """
    order = {
        device_class: number for number, device_class in enumerate(dict.fromkeys(each.device_class for each in options))
    }
    costs = [
        layer_costs(scenario, option.device_class, option.degree, -(-microbatch // option.width), option.recompute)
        for option in options
    ]
    busy_s, way_s = boundary_costs(options, scenario, pipelines, microbatch)
    return Options(
        np.array([order[option.device_class] for option in options], np.int64),
        np.array([option.most_stages for option in options], np.int64),
        np.array([cost.compute_s for cost in costs]),
        np.array([cost.state_bytes for cost in costs]),
        np.array([cost.activation_bytes for cost in costs]),
        np.array([cost.capacity_bytes for cost in costs]),
        busy_s,
        way_s,
        2.0 * scenario.effects.compute.transfers_block * way_s,
        np.array(
            [
                _sums_s(scenario, option.device_class, option.degree, round(pipelines * option.width * holders_each))
                for option in options
            ]
        ),
    )


def lower_bounds_s(
    options: Sequence[StageOption], scenario: Scenario, pipelines: int, microbatch: int
) -> tuple[float, float]:
    """Return lower bounds of the slowest stage's time for one microbatch, and of all stages' together, seconds.

    The second is that of the quickest way for every layer. The first is that of layers which may be cut at any place
    and be anywhere: with c_i(l) the device time of layer l on pool i in the best of its ways, C_i their sum and u_i the
    devices of a pipeline's part, (sum over l of min_i c_i(l) / C_i) / (sum over i of u_i / C_i) is feasible for the
    dual of that linear programme.
    """
    best: dict[DeviceClass, Floats] = {}
    alone_s = np.full(len(scenario.model.layers), np.inf)
    for option in options:
        costs = layer_costs(
            scenario, option.device_class, option.degree, -(-microbatch // option.width), option.recompute
        )
        alone_s, device_s = np.minimum(alone_s, costs.layer_s), costs.layer_s * (option.degree * option.width)
        best[option.device_class] = (
            np.minimum(best[option.device_class], device_s) if option.device_class in best else device_s
        )
    sums_s = {device_class: float(device_s.sum()) for device_class, device_s in best.items()}
    if min(sums_s.values()) <= 0:
        return 0.0, 0.0
    shares = np.min([device_s / sums_s[device_class] for device_class, device_s in best.items()], axis=0)
    bottleneck_s = float(shares.sum()) / sum(
        device_class.size // pipelines / sum_s for device_class, sum_s in sums_s.items()
    )
    return bottleneck_s, float(alone_s.sum())


def class_ring_s(scenario: Scenario, device_class: DeviceClass, size_bytes: float, holders: int) -> float:
    """Return how long a ring of devices of a class takes to sum gradients of ``size_bytes``, seconds."""
    return ring_s([_ring_path(scenario, device_class)], size_bytes, holders) if holders > 1 else 0.0


@lru_cache(maxsize=4096)
def _ring_path(scenario: Scenario, device_class: DeviceClass) -> ConstantRatePath:
    return nominal_path(scenario, *device_class.ends)


@lru_cache(maxsize=65536)
def _sums_s(scenario: Scenario, device_class: DeviceClass, degree: int, holders: int) -> Floats:
    """Seconds of the sum of all layers before one, as if the whole model were summed at once, [layers + 1]."""
    size_bytes = layer_costs(scenario, device_class, degree, 1, False).parameter_bytes
    whole_bytes = float(size_bytes[-1])
    return np.asarray(size_bytes * (class_ring_s(scenario, device_class, whole_bytes, holders) / max(whole_bytes, 1.0)))


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
def _degrees(scenario: Scenario, device_class: DeviceClass) -> tuple[int, ...]:
    """Degrees of tensor parallelism that the model was profiled with on the pool's kind, within a host.

    Raises:
        InputError: The profile has no times for the kind at all.
    """
    scenario.model.times(0, len(scenario.model.layers), device_class.kind, 1)
    sharded = (degree for degree in sorted(scenario.model.sharded) if degree <= device_class.host_size)
    return (1, *(degree for degree in sharded if _is_profiled(scenario, degree, device_class.kind)))


def _is_profiled(scenario: Scenario, degree: int, kind: str) -> bool:
    try:
        scenario.model.at_degree(degree).times(0, len(scenario.model.layers), kind, 1)
    except InputError:
        return False
    return True


@lru_cache(maxsize=4096)
def layer_costs(
    scenario: Scenario, device_class: DeviceClass, degree: int, samples: int, recompute: bool
) -> LayerCosts:
    """Return what all layers before one cost on a device of a pool with so many samples of a microbatch."""
    table = layer_table(scenario, device_class.kind, samples, degree, recompute=recompute)
    model, effects = scenario.model.at_degree(degree), scenario.effects
    states, activations = table.state_bytes, samples * table.activation_bytes
    capacity = device_class.memory_bytes - effects.memory.framework_bytes
    capacity -= round(effects.memory.workspace_share * max(samples * layer.activation_bytes for layer in model.layers))
    seconds = table.layer_s + 3 * effects.compute.launch_overhead_s / len(model.layers)
    if recompute:
        # All activations of one microbatch are there while its backward runs; of the others, the stage's input.
        states, activations = states + activations, np.zeros(len(activations))
        capacity -= (
            MOST_STAGES_OF_CLASS * samples * max(layer.output_bytes for layer in model.layers[:-1] or model.layers)
        )
    return LayerCosts(running_sums(seconds), states, activations, table.parameter_bytes, float(capacity), seconds)
