"""DeepCEE's split of layers over pipeline stages: the split with the shortest step that fits into memory.

The stages' devices and their order are given. The step has M microbatches. For one microbatch, C_s is the compute time
of stage s in both directions, X the transmission time of a link between two stages, and L the link's latency. sync_s is
the time of stage s's gradient sum. The round trip of one microbatch is R_0 = sum of C_s + 2 * sum of (X + L). The
time of a step, the objective, is::

    R_0 + max( over stages s of (M - 1) * C_s + sync_s, over links of (M - 1) * X )

In DeepCEE's terms, T_warm + M * T_max + T_cool + T_sync, R_0 is T_warm + T_cool and one microbatch. Assumption: a
gradient sum delays only its own stage. The memory of stage s, counted from 0 of P, must hold K_s = max(P - s, ceil(R_s
/ T_max)) microbatches, where R_s is the round trip from stage s to the last, unless the caller asks for fewer
(`Depth`).

The search fixes an upper bound on the second term. The shortest R_s then follow from the last stage to the first by
dynamic programming; this is exact, because the shortest R_s also needs the least memory. A larger bound may allow a
shorter R_0, so several bounds are tried: intervals of bounds are halved, and an interval is skipped if no bound in it
can give a shorter step than the best one found.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from planner.cost.layers import launches_s, layer_table, range_memory
from planner.cost.link_sharing import boundary_flows, ring_flows, transfer_times_s
from planner.cost.network import nominal_path
from planner.plan.plan import Replica, Stage
from planner.scenario.scenario import Scenario
from planner.step.graph import Floats, Ints

# Rule for the number of microbatches that a stage's memory must hold: enough to hide the round trips (K_s of the
# module's docstring); 1F1B's number, that of the stages from this one to the last; or one.
Depth = Literal["hiding", "plain", "one"]

# Most parts of a model between which it is divided: all layers of nearly every model.
MOST_PARTS = 160


def split_points(scenario: Scenario) -> Ints:
    """Return the layers at which a stage may begin, followed by the number of layers, [parts + 1]."""
    layers = len(scenario.model.layers)
    parts = min(layers, MOST_PARTS)
    return np.arange(parts + 1) * layers // parts


class SplitProblem(NamedTuple):
    """Costs of every range of layers on every stage.

    A range of layers is given by two indices, its first layer and the layer after its last one (the end layer); both
    are between 0 and the number of layers, or indices of `split_points`. "The link after a stage" leads to the next
    stage.

    Attributes:
        compute_s: Time of one microbatch, forward and backward, seconds, [stages, first layer, end layer]; infinite for
            empty ranges.
        sync_s: Time of the gradient sum over the stage's replicas, seconds, [stages, first layer, end layer].
        room: Number of microbatches whose activations fit into memory, [stages, first layer, end layer].
        transfer_s: Transmission time of one microbatch on the link after a stage, seconds, [stages - 1, end layer].
        latency_s: One-way latency of the link after a stage, seconds, [stages - 1].
        microbatches: Number of microbatches of one step.
    """

    compute_s: Floats
    sync_s: Floats
    room: Ints
    transfer_s: Floats
    latency_s: Floats
    microbatches: int

    def repeated_s(self, stage: int) -> Floats:
        """Return a stage's time for M - 1 microbatches and its gradient sum, seconds, [first layer, end layer]."""
        compute_s = self.compute_s[stage]
        possible = np.isfinite(compute_s)
        repeated_s = (self.microbatches - 1) * np.where(possible, compute_s, 0.0) + self.sync_s[stage]
        return np.where(possible, repeated_s, np.inf)


def split_layers(problem: SplitProblem, depth: Depth = "hiding") -> tuple[int, ...] | None:
    """Return the split of the layers with the shortest step; None if none fits into memory.

    The result is the first layer of each stage, followed by the number of layers; no stage is empty. ``depth`` is the
    rule for the number of microbatches that the memory of each stage must hold.
    """
    repeated_s = np.array([problem.repeated_s(stage) for stage in range(len(problem.compute_s))])
    bounds_s = _bounds_s(problem, repeated_s)

    def least(index: int) -> tuple[float, tuple[int, ...]]:
        trip_s, bounds = _least_round_trip(
            problem, repeated_s, float(bounds_s[index]), depth == "hiding", depth != "one"
        )
        return trip_s, tuple(bounds.tolist())

    low = bisect_left(range(len(bounds_s)), True, key=lambda index: math.isfinite(least(index)[0]))
    high = len(bounds_s) - 1
    if low > high:
        return None
    found = {index: least(index) for index in (low, high)}
    best = min(bounds_s[index] + trip_s for index, (trip_s, _) in found.items())
    halves = [(low, high)]
    while halves:
        left, right = halves.pop()
        # Inside an interval, round trips are no shorter than at its right end, and bounds exceed that at its left end.
        if right - left < 2 or bounds_s[left + 1] + found[right][0] >= best or found[left][0] <= found[right][0]:
            continue
        middle = (left + right) // 2
        found[middle] = least(middle)
        best = min(best, bounds_s[middle] + found[middle][0])
        halves += [(left, middle), (middle, right)]
    return found[min(found, key=lambda each: (bounds_s[each] + found[each][0], each))][1]


def _bounds_s(problem: SplitProblem, repeated_s: Floats) -> Floats:
    """Return every finite value that the objective's second term, the maximum, can take, ascending, seconds."""
    of_links = (problem.microbatches - 1) * problem.transfer_s.ravel()
    every = np.concatenate((repeated_s.ravel(), of_links))
    return np.unique(every[np.isfinite(every)])


@njit(cache=True)
def _least_round_trip(
    problem: SplitProblem, repeated_s: Floats, bound_s: float, hides: bool, plain: bool
) -> tuple[float, Ints]:  # pragma: no cover
    """Return the shortest round trip of a microbatch, seconds, and its split, if no stage or link exceeds ``bound_s``.

    The time is infinite if no split fits into memory. A stage's memory must hold as many microbatches as hide its round
    trip if ``hides``, and as many as stages are left if ``plain``.
    """
    compute_s, _, room, transfer_s, latency_s, microbatches = problem
    stages, ends = compute_s.shape[:2]
    # A little above the bound, so that rounding errors do not exclude the value that is the bound.
    limit_s = bound_s * (1 + 1e-12)
    hides = hides and limit_s > 0 and microbatches > 1
    slowest_s = limit_s / max(microbatches - 1, 1)
    rest_s, behind_s = np.full(ends, np.inf), np.empty(ends)
    rest_s[-1] = 0.0
    cuts = np.zeros((stages, ends), np.int64)
    for stage in range(stages - 1, -1, -1):
        behind_s[:] = rest_s
        if stage < stages - 1:
            for end in range(ends):
                busy_s = transfer_s[stage, end]
                if (microbatches - 1) * busy_s <= limit_s:
                    behind_s[end] += 2 * (busy_s + latency_s[stage])
                else:
                    behind_s[end] = np.inf
        needed = float(stages - stage) if plain else 1.0
        rest_s[:] = np.inf
        for first in range(ends - 1):
            for end in range(first + 1, ends):
                trip_s = compute_s[stage, first, end] + behind_s[end]
                if trip_s >= rest_s[first] or repeated_s[stage, first, end] > limit_s:
                    continue
                depth = max(needed, np.ceil(trip_s / slowest_s - 1e-9)) if hides else needed
                if min(depth, microbatches) <= room[stage, first, end]:
                    rest_s[first], cuts[stage, first] = trip_s, end
    bounds = np.zeros(stages + 1, np.int64)
    for stage in range(stages):
        bounds[stage + 1] = cuts[stage, bounds[stage]]
    return rest_s[0], bounds


Replicas = tuple[Replica, ...]


def split_problem(scenario: Scenario, devices: Sequence[Replicas], microbatches: Sequence[int]) -> SplitProblem:
    """Return the costs of pipelines whose stages are held by the given replicas, at declared bandwidths.

    Ranges of layers are given by the indices of `split_points`. A stage takes as long as its slowest replica. Flows
    between two stages that start together share links.

    Args:
        scenario: Scenario that gives times, sizes, memory and links.
        devices: Replicas of each stage, first stage first.
        microbatches: Samples of each microbatch; costs are those of the largest one.
    """
    samples, layers = max(microbatches), len(scenario.model.layers)
    stages = [Stage(0, layers, replicas, in_flight=1) for replicas in devices]
    boundaries = [_boundary_cost(left, right, samples, scenario) for left, right in pairwise(stages)]
    return SplitProblem(
        np.array([_compute_s(stage, samples, scenario) for stage in stages]),
        np.array([_sync_s(stage, scenario) for stage in stages]),
        np.array([_room(stage, microbatches, scenario) for stage in stages]),
        np.array([transfer_s for transfer_s, _ in boundaries]).reshape(-1, *_shape(scenario)[1:]),
        np.array([latency_s for _, latency_s in boundaries]),
        len(microbatches),
    )


def _boundary_cost(left: Stage, right: Stage, samples: int, scenario: Scenario) -> tuple[Floats, float]:
    """Return the transmission time of each end layer's output, seconds, [parts + 1], and the latency, seconds.

    Both are those of the slower direction.
    """
    directions = [boundary_flows(left, right, samples), boundary_flows(right, left, samples)]
    # Jitter depends on the size of a message, but little: the latency is that of the largest output.
    outputs = np.array([0, *(layer.output_bytes for layer in scenario.model.layers)], np.float64)
    sizes = samples * outputs[split_points(scenario)]
    shares = [each for flows in directions for each in flows.items()]
    delays_s = (nominal_path(scenario, *pair).propagation_s(share * sizes.max()) for pair, share in shares)
    return np.maximum(*(transfer_times_s(flows, sizes, scenario) for flows in directions)), max(delays_s, default=0.0)


def _compute_s(stage: Stage, samples: int, scenario: Scenario) -> Floats:
    slowest_s = np.zeros(_shape(scenario))
    for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True):
        kind = scenario.cluster.by_name[replica.device].kind
        until_s = layer_table(scenario, kind, end - first).compute_s[split_points(scenario)]
        slowest_s = np.maximum(slowest_s, until_s[None, :] - until_s[:, None])
    slowest_s += launches_s(scenario)
    return np.where(_is_range(scenario), slowest_s, np.inf)


def _sync_s(stage: Stage, scenario: Scenario) -> Floats:
    """Return the time of a ring all-reduce of the gradients of every range, seconds, [first layer, end layer]."""
    flows = ring_flows([replica.device for replica in stage.replicas])
    if not flows:
        return np.zeros(_shape(scenario))
    kind = scenario.cluster.by_name[stage.replicas[0].device].kind
    until = layer_table(scenario, kind, 1).parameter_bytes[split_points(scenario)]
    rounds = 2 * (len(flows) - 1)
    part = float(until[-1]) / len(flows)
    latency_s = rounds * max(nominal_path(scenario, *pair).propagation_s(part) for pair in flows)
    # In each round, every device sends one part of the range's gradients to its neighbour.
    parts = np.maximum(0.0, until[None, :] - until[:, None]) / len(flows)
    return rounds * transfer_times_s(dict.fromkeys(flows, 1.0), parts, scenario) + latency_s


def _room(stage: Stage, microbatches: Sequence[int], scenario: Scenario) -> Ints:
    room, ranges = np.full(_shape(scenario), len(microbatches), np.int64), np.ix_(*2 * (split_points(scenario),))
    for replica, samples in zip(stage.replicas, stage.most_samples(microbatches), strict=True):
        resident, saved = (each[ranges] for each in range_memory(scenario, samples))
        free = scenario.cluster.by_name[replica.device].memory_bytes - resident
        fits = np.where(saved > 0, free // np.maximum(saved, 1.0), len(microbatches))
        room = np.minimum(room, np.where(free >= 0, fits, 0).astype(np.int64))
    return np.where(_is_range(scenario), room, 0)


def _shape(scenario: Scenario) -> tuple[int, int]:
    return (len(split_points(scenario)),) * 2


def _is_range(scenario: Scenario) -> NDArray[np.bool_]:
    return np.triu(np.ones(_shape(scenario), np.bool_), 1)
