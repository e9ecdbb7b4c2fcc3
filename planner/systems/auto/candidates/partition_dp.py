"""The partition dynamic programme: layers cut into stages, and each stage on one of several options, in compiled code.

Of all pipelines in which no stage and no link is busy for longer than a bound per microbatch, it finds the one with the
shortest round trip, which is the time from a microbatch's first forward to its last backward. Stages are put in front
of each other, from the last layer to the first, so that the number of microbatches in flight at each stage is known. A
state is the number of stages so far, the option and the first layer of the foremost stage, and a context: what the
stages so far leave to those in front of them. For a chain over device classes it counts the stages on the option's
class (`planner.systems.auto.candidates.stage_options`); for few devices it is the set of devices in use
(`planner.systems.auto.candidates.subset_dp`). The time of a step is

    (M - 1) * bound + round trip.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.step.graph import Floats, Ints

# The least feasible bound is found to within this share of it.
_CLOSE = 0.01

# Bounds that are tried, in multiples of the least feasible one: a slower bottleneck may save a stage, and with few
# microbatches the bottleneck hardly matters.
_WIDER = np.array([1.0, 1.02, 1.06, 1.15, 1.35, 1.8, np.inf])


class PartitionCosts(NamedTuple):
    """Costs of layers on each option: seconds for one microbatch in both directions, and bytes per device.

    Attributes:
        compute_s: Compute time of all layers before each one, without launches, [options, devices, layers + 1].
        launches_s: Launch overhead of a stage.
        resident_bytes: Memory of a range of layers whatever is in flight, [options, devices, first layer, end layer].
        saved_bytes: Memory that each microbatch in flight adds to it, [options, devices, first layer, end layer].
        capacity_bytes: Memory of each device, [options, devices].
        busy_s: Time for which each layer's output keeps the links between two options busy, [options, options, layers].
        transfer_s: Time until each layer's output arrives, plus that of its gradient, [options, options, layers].
        sum_s: Time to sum the gradients of all layers before each one, [options, layers + 1].
        first_context: Context of a last stage on each option, [options].
        next_context: Context after a stage on one option is followed, in front, by one on another, or -1 where that is
            not allowed, [context, option behind, option in front].
        blocks: Whether a stage does nothing else during its transfers.
        waits: Whether a stage whose memory holds fewer microbatches than it needs waits; otherwise it does not fit.
        adds_sums: Whether the gradient sums of all stages count as part of the round trip.
    """

    compute_s: Floats
    launches_s: float
    resident_bytes: Floats
    saved_bytes: Floats
    capacity_bytes: Floats
    busy_s: Floats
    transfer_s: Floats
    sum_s: Floats
    first_context: Ints
    next_context: Ints
    blocks: bool
    waits: bool
    adds_sums: bool


class Limits(NamedTuple):
    """What a pipeline must keep within.

    Attributes:
        microbatches: Microbatches of a step, M.
        bound_s: Most time that a stage or a link takes for one microbatch, seconds.
        round_trip_s: Most time of the round trip, seconds.
        quickest_s: Lower bound of the compute time of all layers before each one, [layers].
        sum_s: Most time that a stage takes to sum its gradients, seconds.
    """

    microbatches: int
    bound_s: float
    round_trip_s: float
    quickest_s: Floats
    sum_s: float


class Partition(NamedTuple):
    """A pipeline's stages, first to last.

    Attributes:
        bottleneck_s: Bound of the slowest stage or link, seconds; infinite if no pipeline fits.
        round_trip_s: Time of one microbatch there and back, seconds.
        option: Option of each stage, [stages].
        first_layer: First layer of each stage, [stages].
    """

    bottleneck_s: float
    round_trip_s: float
    option: Ints
    first_layer: Ints


def best_partition(
    costs: PartitionCosts, microbatches: int, most_stages: int, least_s: float, limit_s: float, most_sum_s: float
) -> Partition:
    """Return the pipeline with the shortest step if that is below ``limit_s``, else one without stages.

    Args:
        costs: Costs of layers on each option.
        microbatches: Microbatches of a step, M.
        most_stages: Most stages of a pipeline.
        least_s: Lower bound of the slowest stage's time, seconds.
        limit_s: Longest step of interest, without gradient sums, seconds.
        most_sum_s: Most time that a stage may take to sum its gradients, seconds.
    """
    bottleneck_s, round_trip_s, option, first_layer = _best_partition(
        costs, microbatches, most_stages, least_s, limit_s, most_sum_s
    )
    return Partition(float(bottleneck_s), float(round_trip_s), option, first_layer)


@njit(cache=True)
def _best_partition(
    costs: PartitionCosts, microbatches: int, most_stages: int, least_s: float, limit_s: float, most_sum_s: float
) -> tuple[float, float, Ints, Ints]:  # pragma: no cover
    options, layers, contexts = costs.compute_s.shape[0], costs.compute_s.shape[2] - 1, costs.next_context.shape[0]
    round_trip_s = np.empty((most_stages + 1, options, contexts, layers))
    next_state = np.empty((most_stages + 1, options, contexts, layers), np.int64)
    quickest_s = np.zeros(layers)
    for layer in range(layers - 1):
        own_s = (costs.compute_s[:, 0, layer + 1] - costs.compute_s[:, 0, layer]).min()
        quickest_s[layer + 1] = quickest_s[layer] + own_s
    high, low, most_s = limit_s / microbatches, least_s, limit_s - (microbatches - 1) * least_s
    limits = Limits(microbatches, high, most_s, quickest_s, most_sum_s)
    if _least(costs, limits, round_trip_s, next_state) == np.inf:
        return np.inf, np.inf, np.empty(0, np.int64), np.empty(0, np.int64)
    while high - low > _CLOSE * high:
        middle, most_s = (low + high) / 2, limit_s - (microbatches - 1) * low
        limits = Limits(microbatches, middle, most_s, quickest_s, most_sum_s)
        if _least(costs, limits, round_trip_s, next_state) == np.inf:
            low = middle
        else:
            high = middle
    best_s, best_bound_s = np.inf, high
    for factor in _WIDER:
        bound_s = min(high * factor, limit_s / microbatches)
        limits = Limits(microbatches, bound_s, most_s, quickest_s, most_sum_s)
        step_s = (microbatches - 1) * bound_s + _least(costs, limits, round_trip_s, next_state)
        if step_s < best_s:
            best_s, best_bound_s = step_s, bound_s
    limits = Limits(microbatches, best_bound_s, most_s, quickest_s, most_sum_s)
    fill(costs, limits, round_trip_s, next_state)
    found_s, start = best_start(round_trip_s, 0, contexts)
    option, first_layer = np.empty(most_stages, np.int64), np.empty(most_stages, np.int64)
    stages = unwind(start, next_state, option, first_layer)
    return best_bound_s, found_s, option[:stages], first_layer[:stages]


@njit(cache=True)
def _least(costs: PartitionCosts, limits: Limits, round_trip_s: Floats, next_state: Ints) -> float:  # pragma: no cover
    """Fill the tables and return the least round trip of all layers, seconds; infinite if nothing fits."""
    fill(costs, limits, round_trip_s, next_state)
    return float(best_start(round_trip_s, 0, round_trip_s.shape[2])[0])


@njit(cache=True)
def best_start(round_trip_s: Floats, context: int, end_context: int) -> tuple[float, int]:  # pragma: no cover
    """Return the least round trip of all layers in a range of contexts, seconds, and the state it starts in, or -1."""
    best_s, start = np.inf, -1
    stages, options, contexts, layers = round_trip_s.shape
    for number in range(1, stages):
        for option in range(options):
            for place in range(context, end_context):
                if round_trip_s[number, option, place, 0] < best_s:
                    best_s = round_trip_s[number, option, place, 0]
                    start = ((number * options + option) * contexts + place) * layers
    return best_s, start


@njit(cache=True)
def fill(costs: PartitionCosts, limits: Limits, round_trip_s: Floats, next_state: Ints) -> None:  # pragma: no cover
    """Fill the tables of all states: the least round trip from there, seconds, and the state after it, -1 for none.

    Both tables are [stages so far, option of the first stage, context, first layer].
    """
    tables, options, contexts, layers = round_trip_s.shape
    round_trip_s[:] = np.inf
    # Least round trip with no more stages: a longer one needs no less memory and leads to nothing better.
    least_s = np.full((options, contexts, layers), np.inf)
    for option in range(options):
        for first in range(layers - 1, -1, -1):
            time_s, sum_s = compute_s(costs, option, first, layers), _sum_s(costs, option, first, layers)
            if time_s > limits.bound_s or sum_s > limits.sum_s:
                break
            # Where stages recompute, a longer one may need less memory: it keeps the input of its first layer.
            if wait_s(costs, option, first, layers, 1, 0.0) > 0:
                continue
            total_s = time_s + (sum_s if costs.adds_sums else 0.0)
            round_trip_s[1, option, costs.first_context[option], first] = total_s
            next_state[1, option, costs.first_context[option], first] = -1
    for stages in range(1, tables - 1):
        for option in range(options):
            for context in range(contexts):
                for end in range(1, layers):
                    so_far_s = round_trip_s[stages, option, context, end]
                    if so_far_s < least_s[option, context, end]:
                        least_s[option, context, end] = so_far_s
                        here = ((stages * options + option) * contexts + context) * layers + end
                        _prepend(costs, limits, stages, option, context, end, here, round_trip_s, next_state)


@njit(cache=True)
def _prepend(
    costs: PartitionCosts,
    limits: Limits,
    stages: int,
    option: int,
    context: int,
    end: int,
    here: int,
    round_trip_s: Floats,
    next_state: Ints,
) -> None:  # pragma: no cover
    """Put every possible stage in front of a state whose first layer is ``end``."""
    so_far_s, depth = round_trip_s[stages, option, context, end], min(limits.microbatches, stages + 1)
    for front in range(round_trip_s.shape[1]):
        place = costs.next_context[context, option, front]
        if place < 0 or costs.busy_s[front, option, end - 1] > limits.bound_s:
            continue
        transfer_s = costs.transfer_s[front, option, end - 1]
        blocked_s = transfer_s if costs.blocks else 0.0
        for first in range(end - 1, -1, -1):
            time_s = compute_s(costs, front, first, end)
            if time_s + blocked_s > limits.bound_s:
                break
            sum_s = costs.sum_s[front, end] - costs.sum_s[front, first]
            total_s = so_far_s + transfer_s + time_s
            if costs.adds_sums:
                total_s += sum_s
            if sum_s > limits.sum_s:
                break
            if total_s + limits.quickest_s[first] > limits.round_trip_s:
                continue
            if wait_s(costs, front, first, end, depth, total_s) > limits.bound_s:
                continue
            if total_s < round_trip_s[stages + 1, front, place, first]:
                round_trip_s[stages + 1, front, place, first] = total_s
                next_state[stages + 1, front, place, first] = here


@njit(cache=True)
def compute_s(costs: PartitionCosts, option: int, first: int, end: int) -> float:  # pragma: no cover
    """Return the seconds that layers take on the slowest device of an option."""
    slowest_s = 0.0
    for device in range(costs.compute_s.shape[1]):
        slowest_s = max(slowest_s, costs.compute_s[option, device, end] - costs.compute_s[option, device, first])
    return slowest_s + costs.launches_s


@njit(cache=True)
def _sum_s(costs: PartitionCosts, option: int, first: int, end: int) -> float:  # pragma: no cover
    return float(costs.sum_s[option, end] - costs.sum_s[option, first])


@njit(cache=True, error_model="numpy")
def wait_s(
    costs: PartitionCosts, option: int, first: int, end: int, depth: int, round_trip_s: float
) -> float:  # pragma: no cover
    """Return the seconds per microbatch for which memory makes a stage wait.

    0 where it holds ``depth`` microbatches, each for a round trip of ``round_trip_s``; infinite where it does not fit.
    """
    held = depth
    for device in range(costs.compute_s.shape[1]):
        room = costs.capacity_bytes[option, device] - costs.resident_bytes[option, device, first, end]
        each = costs.saved_bytes[option, device, first, end]
        if room < 0 or held * each > room:
            if room < each or not costs.waits:
                return np.inf
            held = int(room // each)
    return round_trip_s / held if held < depth else 0.0


@njit(cache=True)
def unwind(start: int, next_state: Ints, option: Ints, first_layer: Ints) -> int:  # pragma: no cover
    """Write option and first layer of each stage from a state on, and return how many stages there are."""
    _, options, contexts, layers = next_state.shape
    flat = next_state.reshape(-1)
    stages, state = 0, start
    while state >= 0:
        option[stages], first_layer[stages] = state // (layers * contexts) % options, state % layers
        state = flat[state]
        stages += 1
    return stages
