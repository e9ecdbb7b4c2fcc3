"""The best cut of a chain of layers into stages on a sequence of pools, in compiled code.

Of all chains of stages in which no stage and no link takes longer than a bound for one microbatch, the one that a
microbatch passes in the least time, there and back: stages are put before each other, from the last layer to the first,
so that it is known how many microbatches each has in flight. The bound is lowered as far as there is such a chain; of
the bounds from there on, the one with the shortest step wins,

    (M - 1) * bound + time of one microbatch there and back.

An option is a way to use a pool: how many devices share each layer, and how many replicas a stage has. All stages of a
chain on one pool use it in the same way, one after the other, and pools come in their order.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The least bound is found to this share of it.
_CLOSE = 0.01

# Bounds that are tried above the least one: a little more time for the slowest stage may spare a stage; and none, since
# with few microbatches it matters little.
_WIDER = np.array([1.0, 1.02, 1.06, 1.15, 1.35, 1.8, np.inf])


class Options(NamedTuple):
    """Ways to use pools; all times in seconds for one microbatch, all sizes in bytes on one device.

    Attributes:
        pool: Which, in the order of the chain, [options].
        most_stages: As many as the pool has devices for, [options].
        compute_s: Of all layers before one, both directions, [options, layers + 1].
        state_bytes: Likewise, [options, layers + 1].
        activation_bytes: Likewise, of one microbatch, [options, layers + 1].
        capacity_bytes: Of a device, [options].
        busy_s: For how long the output of a layer keeps the links from one option's stage to another's busy, all
            pipelines' traffic counted, [options, options, layers].
        way_s: From handing it over to its arrival, [options, options, layers].
        blocked_s: For how long a stage does nothing else while it hands its output over, and takes the gradient of it,
            [options, options, layers].
        sum_s: For how long the gradients of all layers before one are summed, [options, layers + 1].
    """

    pool: Ints
    most_stages: Ints
    compute_s: Floats
    state_bytes: Floats
    activation_bytes: Floats
    capacity_bytes: Floats
    busy_s: Floats
    way_s: Floats
    blocked_s: Floats
    sum_s: Floats


class Chain(NamedTuple):
    """Stages in order.

    Attributes:
        bottleneck_s: Bound of the slowest stage or link, seconds; infinite if nothing fits.
        round_trip_s: Of one microbatch there and back, seconds.
        option: Of each stage.
        first_layer: Of each stage.
    """

    bottleneck_s: float
    round_trip_s: float
    option: Ints
    first_layer: Ints


def best_chain(
    options: Options, microbatches: int, most_stages: int, least_s: float, limit_s: float, most_sum_s: float
) -> Chain:
    """Return the chain with the shortest step, if there is one below ``limit_s``.

    Args:
        options: Ways to use the pools.
        microbatches: Of a step, M.
        most_stages: Of a chain.
        least_s: Lower bound of the slowest stage.
        limit_s: Longer steps, without sums of gradients, are of no use.
        most_sum_s: No stage sums its gradients for longer.
    """
    bottleneck_s, round_trip_s, option, first_layer = _search(
        options, microbatches, most_stages, least_s, limit_s, most_sum_s
    )
    return Chain(float(bottleneck_s), float(round_trip_s), option, first_layer)


@njit(cache=True)
def _search(
    options: Options, microbatches: int, most_stages: int, least_s: float, limit_s: float, most_sum_s: float
) -> tuple[float, float, Ints, Ints]:  # pragma: no cover
    count, layers = options.compute_s.shape[0], options.compute_s.shape[1] - 1
    widest = options.most_stages.max()
    # After `stages` stages, the last of them being the `used`-th of its option: seconds, and what comes next.
    way_s = np.empty((most_stages + 1, count, widest + 1, layers + 1))
    behind = np.empty((most_stages + 1, count, widest + 1, layers + 1), np.int64)
    nothing = np.empty(0, np.int64)
    high = limit_s / microbatches
    quickest_s, low = _quickest_s(options), least_s
    most_s = limit_s - (microbatches - 1) * low
    found, _ = _fill(options, microbatches, most_stages, high, most_s, quickest_s, most_sum_s, way_s, behind)
    if found == np.inf:
        return np.inf, np.inf, nothing, nothing
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        most_s = limit_s - (microbatches - 1) * low
        found, _ = _fill(options, microbatches, most_stages, middle, most_s, quickest_s, most_sum_s, way_s, behind)
        if found == np.inf:
            low = middle
        else:
            high = middle
    best_s, best_bound_s = np.inf, high
    for factor in _WIDER:
        bound_s = min(high * factor, limit_s / microbatches)
        found, _ = _fill(options, microbatches, most_stages, bound_s, most_s, quickest_s, most_sum_s, way_s, behind)
        step_s = (microbatches - 1) * bound_s + found
        if step_s < best_s:
            best_s, best_bound_s = step_s, bound_s
    round_trip_s, last = _fill(
        options, microbatches, most_stages, best_bound_s, most_s, quickest_s, most_sum_s, way_s, behind
    )
    option, first_layer = _unwind(last, behind, layers)
    return best_bound_s, round_trip_s, option, first_layer


@njit(cache=True)
def _quickest_s(options: Options) -> Floats:  # pragma: no cover
    """The least time of all layers before one, each in its quickest way, [layers + 1]."""
    layers = options.compute_s.shape[1] - 1
    quickest_s = np.zeros(layers + 1)
    for layer in range(layers):
        own_s = (options.compute_s[:, layer + 1] - options.compute_s[:, layer]).min()
        quickest_s[layer + 1] = quickest_s[layer] + own_s
    return quickest_s


@njit(cache=True)
def _fill(
    options: Options,
    microbatches: int,
    most_stages: int,
    bound_s: float,
    most_s: float,
    quickest_s: Floats,
    most_sum_s: float,
    way_s: Floats,
    behind: Ints,
) -> tuple[float, int]:  # pragma: no cover
    """Seconds of the best chain of all layers if below ``most_s``, and where it begins in the tables."""
    count, widest, layers = way_s.shape[1], way_s.shape[2] - 1, way_s.shape[3] - 1
    way_s[:] = np.inf
    # The least time to a layer with no more stages, none more of them on the pool: what is worse leads nowhere.
    least_s = np.full((count, widest + 1, layers + 1), np.inf)
    best_s, best = np.inf, -1
    for option in range(count):
        for first in range(layers - 1, -1, -1):
            compute_s = options.compute_s[option, layers] - options.compute_s[option, first]
            if compute_s > bound_s or not _fits(options, option, first, layers, 1, most_sum_s):
                break
            way_s[1, option, 1, first] = compute_s
            behind[1, option, 1, first] = -1
    for stages in range(1, most_stages + 1):
        for option in range(count):
            for used in range(1, options.most_stages[option] + 1):
                if way_s[stages, option, used, 0] < best_s:
                    best_s = way_s[stages, option, used, 0]
                    best = ((stages * count + option) * (widest + 1) + used) * (layers + 1)
                if stages == most_stages:
                    continue
                for end in range(1, layers):
                    so_far_s = way_s[stages, option, used, end]
                    before_s = min(least_s[option, used, end], least_s[option, used - 1, end])
                    least_s[option, used, end] = min(before_s, so_far_s)
                    if so_far_s < before_s:
                        here = ((stages * count + option) * (widest + 1) + used) * (layers + 1) + end
                        _prepend(
                            options,
                            microbatches,
                            stages,
                            option,
                            used,
                            end,
                            so_far_s,
                            here,
                            bound_s,
                            most_s,
                            quickest_s,
                            most_sum_s,
                            way_s,
                            behind,
                        )
    return best_s, best


@njit(cache=True)
def _prepend(
    options: Options,
    microbatches: int,
    stages: int,
    option: int,
    used: int,
    end: int,
    so_far_s: float,
    here: int,
    bound_s: float,
    most_s: float,
    quickest_s: Floats,
    most_sum_s: float,
    way_s: Floats,
    behind: Ints,
) -> None:  # pragma: no cover
    """Put every possible stage that ends before layer ``end`` in front."""
    depth = min(microbatches, stages + 1)
    for before in range(way_s.shape[1]):
        if before == option:
            place = used + 1
        elif options.pool[before] < options.pool[option]:
            place = 1
        else:
            continue
        if place > options.most_stages[before] or options.busy_s[before, option, end - 1] > bound_s:
            continue
        crossing_s, blocked_s = 2 * options.way_s[before, option, end - 1], options.blocked_s[before, option, end - 1]
        for first in range(end - 1, -1, -1):
            compute_s = options.compute_s[before, end] - options.compute_s[before, first]
            if compute_s + blocked_s > bound_s or not _fits(options, before, first, end, depth, most_sum_s):
                break
            time_s = so_far_s + crossing_s + compute_s
            if time_s + quickest_s[first] > most_s:
                continue
            if time_s < way_s[stages + 1, before, place, first]:
                way_s[stages + 1, before, place, first] = time_s
                behind[stages + 1, before, place, first] = here


@njit(cache=True)
def _fits(
    options: Options, option: int, first: int, end: int, depth: int, most_sum_s: float
) -> bool:  # pragma: no cover
    states = options.state_bytes[option, end] - options.state_bytes[option, first]
    activations = options.activation_bytes[option, end] - options.activation_bytes[option, first]
    sum_s = options.sum_s[option, end] - options.sum_s[option, first]
    return bool(states + depth * activations <= options.capacity_bytes[option] and sum_s <= most_sum_s)


@njit(cache=True)
def _unwind(last: int, behind: Ints, layers: int) -> tuple[Ints, Ints]:  # pragma: no cover
    count, widest = behind.shape[1], behind.shape[2] - 1
    flat = behind.reshape(-1)
    length, place = 0, last
    while place >= 0:
        length += 1
        place = flat[place]
    option, first_layer = np.empty(length, np.int64), np.empty(length, np.int64)
    place = last
    for stage in range(length):
        first_layer[stage] = place % (layers + 1)
        option[stage] = place // ((layers + 1) * (widest + 1)) % count
        place = flat[place]
    return option, first_layer
