"""Dynamic programme that divides layers into stages and chooses an option for each stage, in compiled code.

An option is a way to place a stage on devices. The round trip is the time from a microbatch's first forward to its last
backward. For a given bound, the programme finds the pipeline with the shortest round trip among those in which no stage
and no link takes longer than the bound for one microbatch. The time of a step with M microbatches is::

    (M - 1) * bound + round trip

Several bounds are tried. Pipelines are built from the last stage to the first, because the number of microbatches in
flight at a stage depends on the number of stages after it. A state of the programme has four parts:

- the number of stages so far,
- the option of the first of these stages,
- the first layer of this stage,
- a context, which restricts the options of further stages in front. For device classes (`option_costs`) it is the
  number of stages so far on the class of the option, minus one; for few devices (`subset_dp`) the set of used devices.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planner.step.graph import Flags, Floats, Ints

# Relative accuracy of the bisection for the least feasible bound.
ACCURACY = 0.01

# Bounds that are tried, as multiples of the least feasible one. A larger bound may allow fewer stages and thus a
# shorter round trip, which saves more than the bound costs if there are few microbatches.
WIDER = np.array([1.0, 1.02, 1.06, 1.15, 1.35, 1.8, np.inf])

# More microbatches than any step has in flight.
_MOST_HELD = 2**40

# Relative difference of times that may come from rounding alone.
_ROUNDING = 1e-9


class PartitionCosts(NamedTuple):
    """Costs of layers on each option, for one microbatch. Times are in seconds, for forward and backward together.

    Layers are those of the model or, if it has many, parts of it (`cut_points`). Entry i of a running sum covers layers
    0 to i - 1. A range of layers is given by its first layer and its end layer, which is not included. Of two
    neighbouring stages, the front one has the earlier layers, the rear one the later.

    Attributes:
        cuts: First layer of each part in the model, followed by the model's number of layers, [layers + 1].
        compute_s: Running sum of the layers' compute times, [options, devices, layers + 1].
        launches_s: Overhead of a stage for launching forward and backward.
        resident_bytes: Memory of a range of layers without microbatches, [options, devices, first layer, end layer].
        saved_bytes: Memory of a range for each microbatch in flight, [options, devices, first layer, end layer].
        capacity_bytes: Memory of each device, infinite for those not in the option, [options, devices].
        busy_s: Time for which each layer's output keeps a link busy, [front option, rear option, layers].
        transfer_s: Time until each layer's output arrives, plus the time until the gradient of the output arrives,
            [front option, rear option, layers].
        sum_s: Running sum of the times to sum the layers' gradients over replicas, [options, layers + 1].
        first_context: Context of a state with one stage, [options].
        follows: Whether a stage of the rear option may come right behind one of the front option, [front option, rear
            option]. Where it is False, ``busy_s`` and ``transfer_s`` have no meaning.
        entered: Context after a stage of an option is put in front of one of another option, or -1 if it may not be,
            [context, front option].
        stayed: As ``entered``, where the stage behind has the same option, [context, option].
        blocks: Whether a device computes nothing during its transfers.
        waits: Whether a stage may hold fewer microbatches than its depth, and then waits; otherwise it does not fit.
        adds_sums: Whether gradient sums count as part of the round trip.
    """

    cuts: Ints
    compute_s: Floats
    launches_s: float
    resident_bytes: Floats
    saved_bytes: Floats
    capacity_bytes: Floats
    busy_s: Floats
    transfer_s: Floats
    sum_s: Floats
    first_context: Ints
    follows: Flags
    entered: Ints
    stayed: Ints
    blocks: bool
    waits: bool
    adds_sums: bool


class Ranges(NamedTuple):
    """Costs of every range of layers as a stage on each option, [options, end layer, first layer].

    Attributes:
        compute_s: Time on the slowest device of the option, seconds.
        held: Most microbatches that all devices of the option can hold at once; 0 if one does not fit.
    """

    compute_s: Floats
    held: Ints


class Limits(NamedTuple):
    """Upper limits for the pipelines that one run of the dynamic programme builds.

    Attributes:
        microbatches: Number of microbatches of a step, M.
        bound_s: Longest time of a stage or a link for one microbatch, seconds.
        round_trip_s: Longest round trip, seconds.
        quickest_s: Lower bound of the compute time of layers 0 to i - 1, seconds, [layers].
        sum_s: Longest gradient sum of a stage, seconds.
    """

    microbatches: int
    bound_s: float
    round_trip_s: float
    quickest_s: Floats
    sum_s: float


class Tables(NamedTuple):
    """What one run of the dynamic programme fills, of every state, [stages so far, option, context, first layer].

    Attributes:
        round_trip_s: Shortest round trip of the stages so far, seconds; infinite if the state is impossible.
        next_state: Flat index of the state without the first of these stages, or -1 if there is only one stage.
        reached: Whether there are possible states at all, [stages so far, option, context]. Most have none, and then
            the entries of the tables above have no meaning.
        least_s: Shortest round trip with any number of stages so far, seconds, [option, context, first layer].
    """

    round_trip_s: Floats
    next_state: Ints
    reached: Flags
    least_s: Floats


class Fronts(NamedTuple):
    """The options that may come in front of each option: those of option i are entries ``start[i]`` to ``start[i+1]``.

    Attributes:
        option: Front options, one list after the other.
        start: Index in ``option`` of each option's first one, and the end of the last list, [options + 1].
    """

    option: Ints
    start: Ints


class Partition(NamedTuple):
    """The pipeline that `best_partition` has found.

    Attributes:
        bottleneck_s: Bound that no stage and no link exceeds, seconds; infinite if no pipeline fits.
        round_trip_s: Time from a microbatch's first forward to its last backward, seconds.
        option: Index of the option of each stage, first stage first, [stages]; empty if no pipeline fits.
        first_layer: Index in the model of the first layer of each stage, [stages].
    """

    bottleneck_s: float
    round_trip_s: float
    option: Ints
    first_layer: Ints


@njit(cache=True)
def best_partition(
    costs: PartitionCosts, microbatches: int, most_stages: int, least_s: float, limit_s: float, most_sum_s: float
) -> Partition:  # pragma: no cover
    """Return the pipeline with the shortest step, or a `Partition` without stages if no step is within ``limit_s``.

    Args:
        costs: Costs of layers on each option.
        microbatches: Number of microbatches of a step, M.
        most_stages: Largest number of stages.
        least_s: Lower bound of the slowest stage's time for a microbatch, with which the bisection starts, seconds.
        limit_s: Longest time of a step without gradient sums, seconds.
        most_sum_s: Longest gradient sum of a stage, seconds.
    """
    layers, contexts = costs.compute_s.shape[2] - 1, costs.entered.shape[0]
    tables, fronts = new_tables(costs, most_stages), fronts_within(costs, limit_s / microbatches)
    ranges = ranges_within(costs, limit_s / microbatches)
    quickest_s = np.zeros(layers)
    for layer in range(layers - 1):
        own_s = (costs.compute_s[:, 0, layer + 1] - costs.compute_s[:, 0, layer]).min()
        quickest_s[layer + 1] = quickest_s[layer] + own_s
    high, low, most_s = limit_s / microbatches, least_s, limit_s - (microbatches - 1) * least_s
    limits = Limits(microbatches, high, most_s, quickest_s, most_sum_s)
    if not fill(costs, ranges, limits, fronts, tables, True):
        return Partition(np.inf, np.inf, np.empty(0, np.int64), np.empty(0, np.int64))
    while high - low > ACCURACY * high:
        middle, most_s = (low + high) / 2, limit_s - (microbatches - 1) * low
        limits = Limits(microbatches, middle, most_s, quickest_s, most_sum_s)
        if fill(costs, ranges, limits, fronts, tables, True):
            high = middle
        else:
            low = middle
    best_s, best_bound_s, best_trip_s, last_s, stages = np.inf, high, np.inf, -1.0, 0
    option, first_layer = np.empty(most_stages, np.int64), np.empty(most_stages, np.int64)
    for factor in WIDER:
        bound_s = min(high * factor, limit_s / microbatches)
        # Only pipelines with a shorter step count, and no wider bound gives one where this one cannot.
        shorter_s = (best_s - (microbatches - 1) * bound_s) * (1 + _ROUNDING)
        if bound_s == last_s or shorter_s < quickest_s[-1]:
            break
        last_s = bound_s
        limits = Limits(microbatches, bound_s, min(most_s, shorter_s), quickest_s, most_sum_s)
        fill(costs, ranges, limits, fronts, tables, False)
        trip_s, start = best_start(tables, 0, contexts)
        if (microbatches - 1) * bound_s + trip_s < best_s:
            best_s, best_bound_s, best_trip_s = (microbatches - 1) * bound_s + trip_s, bound_s, trip_s
            stages = unwind(start, tables.next_state, option, first_layer)
    return Partition(best_bound_s, best_trip_s, option[:stages], costs.cuts[first_layer[:stages]])


@njit(cache=True)
def new_tables(costs: PartitionCosts, most_stages: int) -> Tables:  # pragma: no cover
    """Return tables for pipelines of up to ``most_stages`` stages."""
    options, layers, contexts = costs.compute_s.shape[0], costs.compute_s.shape[2] - 1, costs.entered.shape[0]
    return Tables(
        np.empty((most_stages + 1, options, contexts, layers)),
        np.empty((most_stages + 1, options, contexts, layers), np.int64),
        np.empty((most_stages + 1, options, contexts), np.bool_),
        np.empty((options, contexts, layers)),
    )


@njit(cache=True)
def fronts_within(costs: PartitionCosts, bound_s: float) -> Fronts:  # pragma: no cover
    """Return the options that may come in front of each, unless a link between them would always exceed a bound.

    Args:
        costs: Costs of layers on each option.
        bound_s: Longest time for which a boundary's message may keep a link busy, seconds.
    """
    options, layers = costs.compute_s.shape[0], costs.compute_s.shape[2] - 1
    option, start = np.empty(options * options, np.int64), np.zeros(options + 1, np.int64)
    count = 0
    for rear in range(options):
        for front in range(options):
            if costs.follows[front, rear]:
                for layer in range(layers - 1):
                    if costs.busy_s[front, rear, layer] <= bound_s:
                        option[count] = front
                        count += 1
                        break
        start[rear + 1] = count
    return Fronts(option[:count], start)


@njit(cache=True)
def ranges_within(costs: PartitionCosts, bound_s: float) -> Ranges:  # pragma: no cover
    """Return the costs of ranges of layers; the compute times of those beyond a bound are infinite."""
    options, devices, layers = costs.compute_s.shape[0], costs.compute_s.shape[1], costs.compute_s.shape[2] - 1
    compute_s = np.full((options, layers + 1, layers), np.inf)
    held = np.zeros((options, layers + 1, layers), np.int64)
    for option in range(options):
        for end in range(1, layers + 1):
            for first in range(end - 1, -1, -1):
                slowest_s = 0.0
                for device in range(devices):
                    until_s = costs.compute_s[option, device]
                    slowest_s = max(slowest_s, until_s[end] - until_s[first])
                if slowest_s + costs.launches_s > bound_s:
                    break
                compute_s[option, end, first] = slowest_s + costs.launches_s
                held[option, end, first] = _held(costs, option, first, end)
    return Ranges(compute_s, held)


@njit(cache=True, error_model="numpy")
def _held(costs: PartitionCosts, option: int, first: int, end: int) -> int:  # pragma: no cover
    held = _MOST_HELD
    for device in range(costs.compute_s.shape[1]):
        room = costs.capacity_bytes[option, device] - costs.resident_bytes[option, device, first, end]
        each = costs.saved_bytes[option, device, first, end]
        if room < 0 or held * each > room:
            held = int(room // each) if room >= each else 0
    return held


@njit(cache=True)
def best_start(tables: Tables, context: int, end_context: int) -> tuple[float, int]:  # pragma: no cover
    """Return the shortest round trip of a whole pipeline, seconds, and the flat index of its entry in the tables.

    Only entries with contexts ``context`` to ``end_context`` - 1 are considered.
    """
    best_s, start = np.inf, -1
    stages, options, contexts, layers = tables.round_trip_s.shape
    for number in range(1, stages):
        for option in range(options):
            for place in range(context, end_context):
                if tables.reached[number, option, place] and tables.round_trip_s[number, option, place, 0] < best_s:
                    best_s = tables.round_trip_s[number, option, place, 0]
                    start = ((number * options + option) * contexts + place) * layers
    return best_s, start


@njit(cache=True)
def fill(
    costs: PartitionCosts, ranges: Ranges, limits: Limits, fronts: Fronts, tables: Tables, stops: bool
) -> bool:  # pragma: no cover
    """Fill tables, and return whether some whole pipeline keeps the limits; with ``stops``, as soon as one is found.

    A state with more stages and no shorter round trip is not extended, since stages in front of more stages need at
    least as much memory.
    """
    round_trip_s, next_state, reached, least_s = tables
    stages_end, options, contexts, layers = round_trip_s.shape
    reached[:] = False
    is_whole = False
    has_least = np.zeros((options, contexts), np.bool_)
    for option in range(options):
        for first in range(layers - 1, -1, -1):
            time_s = ranges.compute_s[option, layers, first]
            sum_s = costs.sum_s[option, layers] - costs.sum_s[option, first]
            if time_s > limits.bound_s or sum_s > limits.sum_s:
                break
            # The loop goes on after a stage that does not fit: with recomputation, a stage with more layers may need
            # less memory, since it saves only the input of its first layer.
            if not ranges.held[option, layers, first]:
                continue
            total_s = time_s + (sum_s if costs.adds_sums else 0.0)
            if not reached[1, option, costs.first_context[option]]:
                reached[1, option, costs.first_context[option]] = True
                round_trip_s[1, option, costs.first_context[option]] = np.inf
            round_trip_s[1, option, costs.first_context[option], first] = total_s
            next_state[1, option, costs.first_context[option], first] = -1
            is_whole = is_whole or first == 0
    for stages in range(1, stages_end - 1):
        for option in range(options):
            for context in range(contexts):
                if not reached[stages, option, context]:
                    continue
                if not has_least[option, context]:
                    has_least[option, context] = True
                    least_s[option, context] = np.inf
                for end in range(1, layers):
                    so_far_s = round_trip_s[stages, option, context, end]
                    if so_far_s < least_s[option, context, end]:
                        least_s[option, context, end] = so_far_s
                        here = ((stages * options + option) * contexts + context) * layers + end
                        state = (stages, option, context, end, here)
                        is_whole |= _prepend(costs, ranges, limits, fronts, state, tables)
                        if is_whole and stops:
                            return True
    return is_whole


@njit(cache=True)
def _prepend(
    costs: PartitionCosts,
    ranges: Ranges,
    limits: Limits,
    fronts: Fronts,
    state: tuple[int, int, int, int, int],
    tables: Tables,
) -> bool:  # pragma: no cover
    """Put every stage that can be in front of a state into the tables of `fill`; return whether one is the first.

    The state is given by its place in the tables and its flat index.
    """
    stages, option, context, end, here = state
    round_trip_s, next_state, reached, _ = tables
    compute_s, held = ranges
    is_whole = False
    so_far_s, depth = round_trip_s[stages, option, context, end], min(limits.microbatches, stages + 1)
    for front in fronts.option[fronts.start[option] : fronts.start[option + 1]]:
        place = costs.stayed[context, front] if front == option else costs.entered[context, front]
        if place < 0 or costs.busy_s[front, option, end - 1] > limits.bound_s:
            continue
        transfer_s = costs.transfer_s[front, option, end - 1]
        blocked_s = transfer_s if costs.blocks else 0.0
        for first in range(end - 1, -1, -1):
            time_s = compute_s[front, end, first]
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
            if wait_s(costs.waits, held[front, end, first], depth, total_s) > limits.bound_s:
                continue
            if not reached[stages + 1, front, place]:
                reached[stages + 1, front, place] = True
                round_trip_s[stages + 1, front, place] = np.inf
            if total_s < round_trip_s[stages + 1, front, place, first]:
                round_trip_s[stages + 1, front, place, first] = total_s
                next_state[stages + 1, front, place, first] = here
                is_whole = is_whole or first == 0
    return is_whole


@njit(cache=True, error_model="numpy")
def wait_s(waits: bool, held: int, depth: int, round_trip_s: float) -> float:  # pragma: no cover
    """Return the time per microbatch of a stage whose microbatches in flight are limited by memory, seconds.

    The result is 0 if memory holds ``depth`` microbatches. If it holds only ``held`` of them, each is in flight for
    ``round_trip_s``, and the result is ``round_trip_s`` / ``held``. The result is infinite if memory holds none, or if
    no stage ``waits``.
    """
    if held >= depth:
        return 0.0
    return round_trip_s / held if held and waits else np.inf


@njit(cache=True)
def unwind(start: int, next_state: Ints, option: Ints, first_layer: Ints) -> int:  # pragma: no cover
    """Write the option and first layer of each stage into two arrays; return the number of stages.

    The stages are those of the pipeline whose state has the flat index ``start`` in ``next_state``.
    """
    _, options, contexts, layers = next_state.shape
    flat = next_state.reshape(-1)
    stages, state = 0, start
    while state >= 0:
        option[stages], first_layer[stages] = state // (layers * contexts) % options, state % layers
        state = flat[state]
        stages += 1
    return stages
