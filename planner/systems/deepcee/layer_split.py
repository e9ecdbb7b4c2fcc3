"""The split of layers over stages in a given order: the fastest step whose activations fit into memory (DeepCEE).

DeepCEE's objective is T_warm + M * T_max + T_cool + T_sync. With C_s the compute time of one microbatch on stage s, X
and L the transmission time and the latency of a link, and the round trip of one microbatch, R_0 = sum C_s + 2 * sum
(X + L), which is T_warm + T_cool and the microbatch itself, it is here

    R_0 + max( over stages of (M - 1) * C_s + sync_s, over links of (M - 1) * X ).

Assumed: a gradient sum counts at its own stage, since other stages go on meanwhile. Memory must hold K_s microbatches,
K_s = max(P - s, ceil(R_s / T_max)), with R_s the round trip from stage s on, or fewer if the caller asks for less.

For a bound on the second term, the least R_s follow from each other, from the last stage to the first; the least R_s
also needs the least memory, so this is exact. A larger bound allows a shorter R_0: the range of bounds is halved
recursively, and parts that cannot contain the best one are skipped.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.cost.layers import launches_s, layer_table, range_memory
from planner.cost.link_sharing import boundary_flows, ring_flows, transfer_times_s
from planner.cost.network import nominal_path
from planner.plan.plan import Replica, Stage
from planner.scenario.scenario import Scenario
from planner.step.graph import Floats, Ints

# Microbatches that memory must hold: as many as hide the round trips, 1F1B's P - s, or one.
Depth = Literal["hiding", "plain", "one"]


@dataclass(frozen=True, eq=False, slots=True)
class SplitProblem:
    """Costs of each range of layers on each stage, in order.

    Attributes:
        compute_s: Compute time of one microbatch, forward and backward, seconds, [stages, first layer, end layer].
        sync_s: Time of the gradient sum over the stage's replicas, seconds, [stages, first layer, end layer].
        room: Microbatches whose activations fit into memory, 0 if the layers alone do not, [stages, first, end].
        transfer_s: Time for which one microbatch keeps the link behind a stage busy, seconds, [stages - 1, end layer].
        latency_s: One-way latency of that link, seconds, [stages - 1].
        microbatches: Microbatches of one step.
    """

    compute_s: Floats
    sync_s: Floats
    room: Ints
    transfer_s: Floats
    latency_s: Floats
    microbatches: int

    def repeated_s(self, stage: int) -> Floats:
        """Return a stage's value in the objective's second term, seconds, [first layer, end layer]."""
        compute_s = self.compute_s[stage]
        possible = np.isfinite(compute_s)
        return np.where(
            possible, (self.microbatches - 1) * np.where(possible, compute_s, 0.0) + self.sync_s[stage], np.inf
        )


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """A split of the layers into stages.

    Attributes:
        bounds: First layers of the stages, and the number of layers.
        step_s: Value of the objective, seconds.
    """

    bounds: tuple[int, ...]
    step_s: float


def split_layers(problem: SplitProblem, depth: Depth = "hiding") -> LayerSplit | None:
    """Return the split with the least objective, or None if none fits into memory at ``depth``; no stage is empty."""
    repeated_s = [problem.repeated_s(stage) for stage in range(len(problem.compute_s))]
    bounds_s = _bounds_s(problem, repeated_s)

    def least(index: int) -> tuple[float, tuple[int, ...]]:
        return _least_round_trip(problem, repeated_s, float(bounds_s[index]), depth)

    low = bisect_left(range(len(bounds_s)), True, key=lambda index: math.isfinite(least(index)[0]))
    high = len(bounds_s) - 1
    if low > high:
        return None
    found = {index: least(index) for index in (low, high)}
    best = min(bounds_s[index] + trip_s for index, (trip_s, _) in found.items())
    halves = [(low, high)]
    while halves:
        left, right = halves.pop()
        # Between the two, no round trip is shorter than at the right end, and no bound smaller than next to the left.
        if right - left < 2 or bounds_s[left + 1] + found[right][0] >= best or found[left][0] <= found[right][0]:
            continue
        middle = (left + right) // 2
        found[middle] = least(middle)
        best = min(best, bounds_s[middle] + found[middle][0])
        halves += [(left, middle), (middle, right)]
    index = min(found, key=lambda each: (bounds_s[each] + found[each][0], each))
    return LayerSplit(found[index][1], float(bounds_s[index] + found[index][0]))


def _bounds_s(problem: SplitProblem, repeated_s: Sequence[Floats]) -> Floats:
    """Return every finite value that the second term of the objective can take, rising, seconds."""
    of_links = (problem.microbatches - 1) * problem.transfer_s.ravel()
    every = np.concatenate((np.array(repeated_s).ravel(), of_links))
    return np.unique(every[np.isfinite(every)])


def _least_round_trip(
    problem: SplitProblem, repeated_s: Sequence[Floats], bound_s: float, depth: Depth
) -> tuple[float, tuple[int, ...]]:
    """Return the least R_0 within a bound on the second term, infinite if nothing fits, and its stages' bounds."""
    stages, repeats = len(problem.compute_s), problem.microbatches - 1
    # Raised by a rounding error, so that a bound allows the value that it was computed from.
    limit_s = bound_s * (1 + 1e-12)
    rest_s = np.full(problem.compute_s.shape[1], np.inf)
    rest_s[-1] = 0.0
    cuts = []
    for stage in reversed(range(stages)):
        behind_s = rest_s
        if stage < stages - 1:
            transfer_s = problem.transfer_s[stage]
            round_trip_s = 2 * (transfer_s + problem.latency_s[stage])
            behind_s = np.where(repeats * transfer_s <= limit_s, rest_s + round_trip_s, np.inf)
        trip_s = problem.compute_s[stage] + behind_s
        allowed = repeated_s[stage] <= limit_s
        needed = _needed_depths(trip_s, stages - stage, limit_s, problem.microbatches, depth)
        trip_s = np.where(allowed & (needed <= problem.room[stage]), trip_s, np.inf)
        cuts.append(np.argmin(trip_s, axis=1))
        rest_s = trip_s[np.arange(len(trip_s)), cuts[-1]]
    if math.isinf(rest_s[0]):
        return math.inf, ()
    bounds = [0]
    for ends in reversed(cuts):
        bounds.append(int(ends[bounds[-1]]))
    return float(rest_s[0]), tuple(bounds)


def _needed_depths(trip_s: Floats, stages_left: int, bound_s: float, microbatches: int, depth: Depth) -> Floats:
    """Return the microbatches that a stage must hold, [first layer, end layer]."""
    if depth == "one" or microbatches == 1:
        return np.ones_like(trip_s)
    wanted = np.full_like(trip_s, stages_left)
    if depth == "hiding" and bound_s > 0:
        slowest_s = bound_s / (microbatches - 1)
        wanted = np.maximum(wanted, np.ceil(np.where(np.isfinite(trip_s), trip_s, 0.0) / slowest_s - 1e-9))
    return np.minimum(wanted, microbatches)


Replicas = tuple[Replica, ...]


def split_problem(scenario: Scenario, devices: Sequence[Replicas], microbatches: Sequence[int]) -> SplitProblem:
    """Return the costs of stages on these devices, in this order, at declared bandwidths.

    A stage is as slow as its slowest replica; flows that start together share links.

    Args:
        scenario: Scenario that gives times, sizes, memory and links.
        devices: Replicas of each stage, with their shares.
        microbatches: Samples of each microbatch; costs are those of the largest.
    """
    samples, layers = max(microbatches), len(scenario.model.layers)
    stages = [Stage(0, layers, replicas, in_flight=1) for replicas in devices]
    boundaries = [_boundary_cost(left, right, samples, scenario) for left, right in pairwise(stages)]
    return SplitProblem(
        np.array([_compute_s(stage, samples, scenario) for stage in stages]),
        np.array([_sync_s(stage, scenario) for stage in stages]),
        np.array([_room(stage, microbatches, scenario) for stage in stages]),
        np.array([transfer_s for transfer_s, _ in boundaries]).reshape(-1, layers + 1),
        np.array([latency_s for _, latency_s in boundaries]),
        len(microbatches),
    )


def _boundary_cost(left: Stage, right: Stage, samples: int, scenario: Scenario) -> tuple[Floats, float]:
    """Seconds of each layer's output, [layers + 1], and the latency, of the worse direction."""
    directions = [boundary_flows(left, right, samples), boundary_flows(right, left, samples)]
    # The latency of the largest output: a smaller one has hardly less jitter.
    sizes = samples * np.array([0, *(layer.output_bytes for layer in scenario.model.layers)], np.float64)
    shares = [each for flows in directions for each in flows.items()]
    delays_s = (nominal_path(scenario, *pair).propagation_s(share * sizes.max()) for pair, share in shares)
    return np.maximum(*(transfer_times_s(flows, sizes, scenario) for flows in directions)), max(delays_s, default=0.0)


def _compute_s(stage: Stage, samples: int, scenario: Scenario) -> Floats:
    slowest_s = np.zeros(_shape(scenario))
    for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True):
        kind = scenario.cluster.by_name[replica.device].kind
        until_s = layer_table(scenario, kind, end - first).compute_s
        slowest_s = np.maximum(slowest_s, until_s[None, :] - until_s[:, None])
    slowest_s += launches_s(scenario)
    return np.where(_is_range(scenario), slowest_s, np.inf)


def _sync_s(stage: Stage, scenario: Scenario) -> Floats:
    """Return the time of a ring: every round sends a part over every link and takes its latency."""
    flows = ring_flows([replica.device for replica in stage.replicas])
    if not flows:
        return np.zeros(_shape(scenario))
    kind = scenario.cluster.by_name[stage.replicas[0].device].kind
    until = layer_table(scenario, kind, 1).parameter_bytes
    rounds = 2 * (len(flows) - 1)
    part = float(until[-1]) / len(flows)
    latency_s = rounds * max(nominal_path(scenario, *pair).propagation_s(part) for pair in flows)
    # In each round every device sends a part: all parts of a range of layers are one message's size.
    parts = np.maximum(0.0, until[None, :] - until[:, None]) / len(flows)
    return rounds * transfer_times_s(dict.fromkeys(flows, 1.0), parts, scenario) + latency_s


def _room(stage: Stage, microbatches: Sequence[int], scenario: Scenario) -> Ints:
    room = np.full(_shape(scenario), len(microbatches), np.int64)
    for replica, samples in zip(stage.replicas, stage.most_samples(microbatches), strict=True):
        resident, saved = range_memory(scenario, samples)
        free = scenario.cluster.by_name[replica.device].memory_bytes - resident
        fits = np.where(saved > 0, free // np.maximum(saved, 1.0), len(microbatches))
        room = np.minimum(room, np.where(free >= 0, fits, 0).astype(np.int64))
    return np.where(_is_range(scenario), room, 0)


def _shape(scenario: Scenario) -> tuple[int, int]:
    return (len(scenario.model.layers) + 1,) * 2


def _is_range(scenario: Scenario) -> NDArray[np.bool_]:
    return np.triu(np.ones(_shape(scenario), np.bool_), 1)


def relative_shares(times_s: dict[str, float]) -> Replicas:
    """Return devices as replicas whose shares are their speeds relative to the fastest.

    Args:
        times_s: Device to the seconds it takes for the same work.
    """
    least_s = min(times_s.values())
    return tuple(Replica(name, least_s / each if each else 1.0) for name, each in times_s.items())
