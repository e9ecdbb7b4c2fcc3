"""Tables of the costs of stage options on device classes, and lower bounds of pipelines that use them.

`planner.systems.auto.candidates.partition_dp` uses the tables.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np
from numba import njit

from planner.cost.layers import LayerTable, launches_s, layer_table
from planner.cost.network import ConstantRatePath, nominal_path, payload_bps
from planner.cost.synchronisation import group_bytes, ring_s
from planner.scenario.scenario import Scenario
from planner.step.graph import Flags, Floats, Ints
from planner.systems.auto.candidates.cut_points import at_cut_points, cut_points, part_memory
from planner.systems.auto.candidates.device_classes import DeviceClass, StageOption
from planner.systems.auto.candidates.partition_dp import PartitionCosts


def option_costs(
    options: Sequence[StageOption],
    scenario: Scenario,
    pipelines: int,
    microbatch: int,
    holder_factor: float,
    most_busy_s: float,
) -> PartitionCosts:
    """Return the costs of options; classes may follow each other in any order, see `with_class_order`.

    Args:
        options: Options on the device classes.
        scenario: Scenario that gives model and links.
        pipelines: Number of equal pipelines that share the classes.
        microbatch: Samples of a microbatch.
        holder_factor: Number of replicas of a layer in the whole plan divided by their number in these pipelines.
        most_busy_s: Longest time of interest for which a microbatch keeps a link busy, seconds.
    """
    memory = [
        part_memory(scenario, each.samples(microbatch), each.degree, recompute=each.recompute) for each in options
    ]
    cuts = cut_points(scenario)
    busy_s, round_trip_s, follows = boundary_costs(options, scenario, pipelines, microbatch, most_busy_s)
    return PartitionCosts(
        cuts,
        np.array([[option_table(scenario, each, microbatch).compute_s[cuts]] for each in options]),
        launches_s(scenario),
        np.array([[resident] for resident, _ in memory]),
        np.array([[saved] for _, saved in memory]),
        np.array([[each.device_class.memory_bytes] for each in options], np.float64),
        at_cut_points(busy_s, scenario),
        at_cut_points(round_trip_s, scenario),
        np.array(
            [
                _sums_s(scenario, each.device_class, each.degree, round(pipelines * each.width * holder_factor))[cuts]
                for each in options
            ]
        ),
        np.zeros(len(options), np.int64),
        follows,
        *contexts(options),
        scenario.effects.compute.transfers_block,
        waits=False,
        adds_sums=False,
    )


def contexts(options: Sequence[StageOption]) -> tuple[Ints, Ints]:
    """Return `PartitionCosts.entered` and `PartitionCosts.stayed` of options on the device classes.

    The context is the number of stages on the class so far, minus one.
    """
    most = np.array([each.most_stages for each in options])
    context = np.arange(most.max())[:, None]
    return np.zeros((len(context), len(options)), np.int64), np.where(context + 1 < most, context + 1, -1)


def with_class_order(
    costs: PartitionCosts, options: Sequence[StageOption], places: Mapping[DeviceClass, int]
) -> PartitionCosts:
    """Return costs with which a pipeline uses device classes in one order.

    All stages of a pipeline on one device class use the same option and are consecutive.

    Args:
        costs: The costs of `option_costs`.
        options: Options on the device classes.
        places: Device class to its position along a pipeline.
    """
    place = np.array([places[each.device_class] for each in options])
    may = (place[:, None] < place) | np.eye(len(options), dtype=np.bool_)
    return costs._replace(follows=costs.follows & may)


def lower_bounds_s(
    options: Sequence[StageOption], scenario: Scenario, pipelines: int, microbatch: int
) -> tuple[float, float]:
    """Return lower bounds of the slowest stage's time and of the sum of all stages' times, for one microbatch, seconds.

    The second bound takes the fastest option for every layer. The first solves the dual of a linear programme in which
    any fraction of a layer may be on any class::

        (sum over layers l of min over classes i of c_i(l) / C_i) / (sum over i of u_i / C_i)

    For each option of class i, the time of layer l is multiplied by the number of devices that share it; c_i(l) is the
    least of these products. C_i is the sum of c_i(l) over all layers, and u_i the number of devices of class i for each
    pipeline.
    """
    best: dict[DeviceClass, Floats] = {}
    alone_s = np.full(len(scenario.model.layers), np.inf)
    for option in options:
        layer_s = option_table(scenario, option, microbatch).layer_s
        alone_s, device_s = np.minimum(alone_s, layer_s), layer_s * (option.degree * option.width)
        best[option.device_class] = np.minimum(best.get(option.device_class, device_s), device_s)
    sums_s = {each: float(device_s.sum()) for each, device_s in best.items()}
    if min(sums_s.values()) <= 0:
        return 0.0, 0.0
    shares = np.min([device_s / sums_s[each] for each, device_s in best.items()], axis=0)
    bottleneck_s = float(shares.sum()) / sum(each.size // pipelines / sum_s for each, sum_s in sums_s.items())
    return bottleneck_s, float(alone_s.sum())


def class_ring_s(scenario: Scenario, device_class: DeviceClass, size_bytes: float, holders: int, degree: int) -> float:
    """Return the time of a ring all-reduce of ``size_bytes`` over ``holders`` groups of ``degree`` devices, seconds.

    Hops that begin and end in one host share its link, those between hosts the region's network.
    """
    if holders <= 1:
        return 0.0
    path = [_class_path(scenario, device_class, device_class)[0]]
    shared_s = size_bytes * max(ring_loads_s(scenario, device_class, holders, degree))
    return max(ring_s(path, size_bytes, holders, degree), ring_s(path, 0.0, holders) + shared_s)


@lru_cache(maxsize=65536)
def ring_loads_s(scenario: Scenario, device_class: DeviceClass, holders: int, degree: int) -> tuple[float, float]:
    """Return for how long each byte of a ring all-reduce keeps a host's link and the region's network busy, seconds.

    A host's link carries the rings of as many stages as the host has room for. Groups of a ring are in neighbouring
    hosts, each full.
    """
    if holders <= 1:
        return 0.0, 0.0
    of_host = max(1, device_class.host_size // degree)
    hosts, rings = -(-holders // of_host), max(1, of_host // holders)
    inside = rings * holders if hosts == 1 else of_host - 1
    host = max(device_class.hosts, key=len)
    loads_s = [0.0, 0.0]
    for hops, ends in ((inside, (host[0], host[-1])), (hosts if hosts > 1 else 0, device_class.ends)):
        for link in scenario.cluster.path(*ends) if hops and ends[0] != ends[1] else ():
            if link.source == link.target:
                sent = 8 * 2 * (holders - 1) / holders
                each_s = hops * sent / payload_bps(scenario.effects.network, link.bandwidth_bps)
                place = int(link.source in scenario.cluster.regions)
                loads_s[place] = max(loads_s[place], each_s)
    return loads_s[0], loads_s[1]


@lru_cache(maxsize=65536)
def _sums_s(scenario: Scenario, device_class: DeviceClass, degree: int, holders: int) -> Floats:
    """Return the time to sum the gradients of layers 0 to i - 1 for every i, seconds, [layers + 1].

    It is assumed to be in proportion to the bytes of the gradients.
    """
    shares = layer_table(scenario, device_class.kind, 1, degree).parameter_bytes
    whole_bytes = group_bytes(scenario, 0, len(scenario.model.layers), degree)
    whole_s = class_ring_s(scenario, device_class, whole_bytes, holders, degree)
    return np.asarray(shares * (whole_s / max(shares[-1], 1.0)))


def option_table(scenario: Scenario, option: StageOption, microbatch: int) -> LayerTable:
    """Return the costs of layers on one device of an option, whose replicas share ``microbatch`` samples."""
    samples = option.samples(microbatch)
    return layer_table(scenario, option.device_class.kind, samples, option.degree, recompute=option.recompute)


def boundary_costs(
    options: Sequence[StageOption], scenario: Scenario, pipelines: int, microbatch: int, most_busy_s: float = inf
) -> tuple[Floats, Floats, Flags]:
    """Return the costs of sending a layer's output from one stage to the next, and its gradient back.

    Args:
        options: Options on the device classes.
        scenario: Scenario that gives links and sizes.
        pipelines: Number of pipelines that send at the same time.
        microbatch: Samples of a microbatch.
        most_busy_s: Longest time of interest of the first result, seconds.

    Returns:
        Two arrays of seconds, [option of the sending stage, option of the receiving stage, layer]. The first is the
        time for which the outputs of all pipelines for one microbatch, or their gradients, keep the busiest link busy,
        since they share the network interfaces of hosts and the links of regions. The second is the time until one
        output arrives, plus the time until its gradient arrives on the way back. The third array tells between which
        options the first time is within ``most_busy_s`` for some layer; the others have no times.
    """
    places = {each: place for place, each in enumerate(dict.fromkeys(option.device_class for option in options))}
    links = _class_links(scenario, tuple(places))
    place = np.array([places[option.device_class] for option in options])
    width = np.array([option.width for option in options])
    # Assumption: all devices of a host hold the same stage, for different pipelines or as replicas, and send together.
    senders = [min(pipelines * option.width, option.device_class.host_size // option.degree or 1) for option in options]
    host_samples = np.array(senders) * -(-microbatch // width)
    # Of two stages, the one with more replicas decides the size of a message.
    widths, own = np.unique(width, return_inverse=True)
    size = np.maximum(own[:, None], own)
    tables = np.stack([_class_messages_s(scenario, tuple(places), -(-microbatch // each)) for each in widths.tolist()])
    return _both_ways(
        tables,
        size,
        place,
        links.host_s,
        links.region_s,
        host_samples,
        pipelines * microbatch,
        most_busy_s,
    )


@njit(cache=True)
def _both_ways(
    tables_s: Floats,
    size: Ints,
    place: Ints,
    host_s: Floats,
    region_s: Floats,
    host_samples: Ints,
    samples: int,
    most_busy_s: float,
) -> tuple[Floats, Floats, Flags]:  # pragma: no cover
    """Return the results of `boundary_costs`, in one pass, since arrays of all pairs of options are large.

    Args:
        tables_s: Times of `_class_messages_s` for each size of message, [sizes, 2, class, class, layers].
        size: Index of the size of messages between two options, [options, options].
        place: Index of each option's class, [options].
        host_s: As of `_ClassLinks`.
        region_s: As of `_ClassLinks`.
        host_samples: Samples of a microbatch on all devices of a host, [options].
        samples: Samples of the microbatches of all pipelines.
        most_busy_s: As of `boundary_costs`.
    """
    options, layers, classes = len(place), host_s.shape[2], host_s.shape[0]
    # Most classes of a large cluster are too far from each other, whatever the options: their times are never needed.
    near = np.zeros((len(tables_s), classes, classes), np.bool_)
    for number in range(len(tables_s)):
        for one in range(classes):
            for other in range(classes):
                for layer in range(max(1, layers - 1)):
                    there_s = max(samples * region_s[one, other, layer], tables_s[number, 0, one, other, layer])
                    back_s = max(samples * region_s[other, one, layer], tables_s[number, 0, other, one, layer])
                    if max(there_s, back_s) <= most_busy_s:
                        near[number, one, other] = True
                        break
    busy_s, round_trip_s = np.empty((options, options, layers)), np.empty((options, options, layers))
    follows = np.zeros((options, options), np.bool_)
    for front in range(options):
        for rear in range(front + 1):
            one, other, number = place[front], place[rear], size[front, rear]
            if not near[number, one, other]:
                continue
            follows[front, rear] = follows[rear, front] = True
            for layer in range(layers):
                there_s = max(host_samples[front] * host_s[one, other, layer], samples * region_s[one, other, layer])
                back_s = max(host_samples[rear] * host_s[other, one, layer], samples * region_s[other, one, layer])
                there_s = max(there_s, tables_s[number, 0, one, other, layer])
                back_s = max(back_s, tables_s[number, 0, other, one, layer])
                both_s = tables_s[number, 1, one, other, layer] + tables_s[number, 1, other, one, layer]
                busy_s[front, rear, layer] = busy_s[rear, front, layer] = max(there_s, back_s)
                round_trip_s[front, rear, layer] = round_trip_s[rear, front, layer] = both_s
    return busy_s, round_trip_s, follows


class _ClassLinks(NamedTuple):
    """Times that one sample keeps shared links busy, as of `_class_path`, seconds, [class, class, layers] each."""

    host_s: Floats
    region_s: Floats


@lru_cache(maxsize=1024)
def _class_links(scenario: Scenario, classes: tuple[DeviceClass, ...]) -> _ClassLinks:
    nothing = np.zeros((len(classes), len(classes), len(scenario.model.layers)))
    links = _ClassLinks(nothing, nothing.copy())
    for one, source in enumerate(classes):
        for other, target in enumerate(classes):
            if one != other or source.size > 1:
                _, links.host_s[one, other], links.region_s[one, other] = _class_path(scenario, source, target)
    return links


@lru_cache(maxsize=1024)
def _class_messages_s(scenario: Scenario, classes: tuple[DeviceClass, ...], samples: int) -> Floats:
    """Return the times of `_message_s` between classes, [2, class, class, layers]; 0 from a single device to itself."""
    times_s = np.zeros((2, len(classes), len(classes), len(scenario.model.layers)))
    for one, source in enumerate(classes):
        for other, target in enumerate(classes):
            if one != other or source.size > 1:
                times_s[:, one, other] = _message_s(scenario, source, target, samples)
    return times_s


@lru_cache(maxsize=65536)
def _class_path(scenario: Scenario, one: DeviceClass, other: DeviceClass) -> tuple[ConstantRatePath, Floats, Floats]:
    """Return the path between devices of two classes, and the times that one sample keeps shared links busy.

    These are the times of each layer's output on the slowest network interface of a host or link inside it, and on the
    slowest link within or between regions, seconds, [layers] each.
    """
    source, target = one.ends[0], other.ends[1]
    cluster = scenario.cluster
    bits = 8 * np.array([layer.output_bytes for layer in scenario.model.layers], np.float64)
    host_s, region_s = np.zeros(len(bits)), np.zeros(len(bits))
    for link in cluster.path(source, target):
        seconds = bits / payload_bps(scenario.effects.network, link.bandwidth_bps)
        if "network" in (link.source, link.target):
            host_s = np.maximum(host_s, seconds)
        elif link.source in cluster.regions:
            # The network of a region carries outputs and their gradients on one link.
            region_s = np.maximum(region_s, 2 * seconds if link.source == link.target else seconds)
        elif link.source == link.target:
            # So does the link inside a host.
            host_s = np.maximum(host_s, 2 * seconds)
    return nominal_path(scenario, source, target), host_s, region_s


@lru_cache(maxsize=65536)
def _message_s(scenario: Scenario, one: DeviceClass, other: DeviceClass, samples: int) -> Floats:
    """Return the transmission and the delivery time of each layer's output on an idle path, seconds, [2, layers]."""
    path, _, _ = _class_path(scenario, one, other)
    sizes, which = _output_sizes(scenario)
    times_s = [(path.transmission_s(samples * size), path.delivery_s(samples * size)) for size in sizes]
    return np.array(times_s)[which].T


@lru_cache(maxsize=64)
def _output_sizes(scenario: Scenario) -> tuple[list[int], Ints]:
    """Return the different sizes of layers' outputs for a sample, bytes, and the index of each layer's, [layers]."""
    sizes, which = np.unique([layer.output_bytes for layer in scenario.model.layers], return_inverse=True)
    return sizes.tolist(), which
