"""The best chains of stages on groups of few, unlike devices, in compiled code.

A group is any set of devices, which are the replicas of a stage. A chain gives layers to groups that have no device in
common. For every set of devices that a chain may use, and for every bound of a grid for the slowest stage or link, the
chain that one microbatch passes in the least time, there and back, sums of gradients added, is found: stages are put
before each other, from the last layer to the first. With few devices nothing is left out but what memory forbids. Where
there are few chains (`planner.systems.auto.candidates.small_cluster`), each of them gets its times instead.

    step = (microbatches - 1) * bound + pass
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Groups(NamedTuple):
    """All sets of devices; a set is a number whose bits are its devices. Times in seconds, of one microbatch.

    Attributes:
        compute_s: Of all layers before one on each device of a set, both directions, [sets, devices, layers + 1].
        samples: Of a microbatch on each device of a set, [sets, devices].
        state_bytes: Of all layers before one, [layers + 1].
        activation_bytes: Of all layers before one, for one sample, [layers + 1].
        capacity_bytes: Of each device, [devices].
        busy_s: For how long a layer's output keeps the links from one set to another busy, [sets, sets, layers].
        way_s: From handing it over to its arrival, [sets, sets, layers].
        blocked: Whether devices wait for transfers.
        sum_s: Of the gradients of all layers, over the devices of a set, [sets].
    """

    compute_s: Floats
    samples: Ints
    state_bytes: Floats
    activation_bytes: Floats
    capacity_bytes: Floats
    busy_s: Floats
    way_s: Floats
    blocked: bool
    sum_s: Floats


class Chains(NamedTuple):
    """Chains of stages; with so many microbatches a step takes `steps_s`.

    Attributes:
        used: The set of all devices, [chains].
        bound_s: What no stage or link takes longer than for a microbatch, [chains].
        round_trip_s: Of one microbatch there and back, sums added, [chains].
        group: Of each stage; 0 after the last, [chains, devices].
        first_layer: Of each stage, [chains, devices].
    """

    used: Ints
    bound_s: Floats
    round_trip_s: Floats
    group: Ints
    first_layer: Ints

    def steps_s(self, microbatches: int) -> Floats:
        """Return the seconds of a step of so many microbatches, [chains]."""
        return np.asarray((microbatches - 1) * self.bound_s + self.round_trip_s)


def best_chains(groups: Groups, microbatches: int, bounds_s: Floats) -> Chains:
    """Return the best chains for each bound and each set of devices, all of which they use.

    Args:
        groups: What groups cost.
        microbatches: Of a step, at most: stages hold as many of them as there are stages behind.
        bounds_s: For the slowest stage or link, rising, seconds.
    """
    round_trip_s, group, first_layer = _best_chains(groups, microbatches, bounds_s)
    bound, used = np.nonzero(np.isfinite(round_trip_s))
    stages = np.concatenate((group[bound, used], first_layer[bound, used]), axis=1)
    # The same chain with the least bound.
    _, first = np.unique(stages, axis=0, return_index=True)
    bound, used = bound[first], used[first]
    return Chains(used, bounds_s[bound], round_trip_s[bound, used], group[bound, used], first_layer[bound, used])


def timed_chains(groups: Groups, microbatches: int, group: Ints, first_layer: Ints) -> Chains:
    """Return those of given chains that fit, with their times; arguments as in `best_chains` and `Chains`."""
    bound_s, round_trip_s = _time_chains(groups, microbatches, group, first_layer)
    fits = np.isfinite(round_trip_s)
    used = np.bitwise_or.reduce(group, axis=1)
    return Chains(used[fits], bound_s[fits], round_trip_s[fits], group[fits], first_layer[fits])


@njit(cache=True)
def _time_chains(
    groups: Groups, microbatches: int, group: Ints, first_layer: Ints
) -> tuple[Floats, Floats]:  # pragma: no cover
    chains, devices = group.shape
    layers = groups.compute_s.shape[2] - 1
    bound_s, round_trip_s = np.zeros(chains), np.zeros(chains)
    for chain in range(chains):
        end, behind = layers, 0
        for stage in range(devices - 1, -1, -1):
            here = group[chain, stage]
            if here:
                first = first_layer[chain, stage]
                time_s = _compute_s(groups, here, first, end)
                ways_s = busy_s = 0.0
                if behind:
                    after = group[chain, stage + 1]
                    ways_s = groups.way_s[here, after, end - 1] + groups.way_s[after, here, end - 1]
                    busy_s = max(groups.busy_s[here, after, end - 1], groups.busy_s[after, here, end - 1])
                round_trip_s[chain] += time_s + ways_s + _share(groups, first, end) * groups.sum_s[here]
                # As many microbatches as there are stages from here on.
                wait_s = _wait_s(groups, here, first, end, min(microbatches, behind + 1), round_trip_s[chain])
                bound_s[chain] = max(bound_s[chain], busy_s, time_s + (ways_s if groups.blocked else 0.0), wait_s)
                end, behind = first, behind + 1
        if not np.isfinite(bound_s[chain]):
            round_trip_s[chain] = np.inf
    return bound_s, round_trip_s


@njit(cache=True)
def _best_chains(groups: Groups, microbatches: int, bounds_s: Floats) -> tuple[Floats, Ints, Ints]:  # pragma: no cover
    sets, devices, layers = groups.compute_s.shape[0], groups.compute_s.shape[1], groups.compute_s.shape[2] - 1
    best_s = np.full((len(bounds_s), sets), np.inf)
    group = np.zeros((len(bounds_s), sets, devices), np.int64)
    first_layer = np.zeros((len(bounds_s), sets, devices), np.int64)
    # Of chains on a set that begin with a group at a layer and have so many stages: seconds, and what comes next.
    round_trip_s = np.empty((devices + 1, sets, sets, layers))
    behind = np.empty((devices + 1, sets, sets, layers), np.int64)
    for number, bound_s in enumerate(bounds_s):
        _fill(groups, microbatches, bound_s, round_trip_s, behind)
        for used in range(1, sets):
            best_stages, best_group = 0, 0
            for stages in range(1, devices + 1):
                for begin in range(1, sets):
                    if round_trip_s[stages, used, begin, 0] < best_s[number, used]:
                        best_s[number, used] = round_trip_s[stages, used, begin, 0]
                        best_stages, best_group = stages, begin
            if best_stages:
                _unwind(behind, best_stages, used, best_group, group[number, used], first_layer[number, used])
    return best_s, group, first_layer


@njit(cache=True)
def _fill(
    groups: Groups, microbatches: int, bound_s: float, round_trip_s: Floats, behind: Ints
) -> None:  # pragma: no cover
    devices, sets, layers = round_trip_s.shape[0] - 1, round_trip_s.shape[1], round_trip_s.shape[3]
    round_trip_s[:] = np.inf
    for begin in range(1, sets):
        for first in range(layers - 1, -1, -1):
            time_s = _compute_s(groups, begin, first, layers)
            if time_s > bound_s or _wait_s(groups, begin, first, layers, 1, 0.0) > 0:
                break
            round_trip_s[1, begin, begin, first] = time_s + _share(groups, first, layers) * groups.sum_s[begin]
            behind[1, begin, begin, first] = -1
    for stages in range(1, devices):
        depth = min(microbatches, stages + 1)
        for used in range(1, sets):
            for begin in range(1, sets):
                if begin & used != begin:
                    continue
                for end in range(1, layers):
                    so_far_s = round_trip_s[stages, used, begin, end]
                    if so_far_s < np.inf:
                        here = begin * layers + end
                        for before in range(1, sets):
                            if before & used == 0:
                                _prepend(
                                    groups,
                                    before,
                                    used,
                                    begin,
                                    end,
                                    depth,
                                    so_far_s,
                                    here,
                                    bound_s,
                                    round_trip_s[stages + 1],
                                    behind[stages + 1],
                                )


@njit(cache=True)
def _prepend(
    groups: Groups,
    before: int,
    used: int,
    begin: int,
    end: int,
    depth: int,
    so_far_s: float,
    here: int,
    bound_s: float,
    round_trip_s: Floats,
    behind: Ints,
) -> None:  # pragma: no cover
    """Put every possible stage of a group that ends before layer ``end`` in front."""
    # The links there and those back may be unlike.
    ways_s = groups.way_s[before, begin, end - 1] + groups.way_s[begin, before, end - 1]
    blocked_s = ways_s if groups.blocked else 0.0
    if max(groups.busy_s[before, begin, end - 1], groups.busy_s[begin, before, end - 1]) > bound_s:
        return
    for first in range(end - 1, -1, -1):
        time_s = _compute_s(groups, before, first, end)
        total_s = so_far_s + time_s + ways_s + _share(groups, first, end) * groups.sum_s[before]
        if max(time_s + blocked_s, _wait_s(groups, before, first, end, depth, total_s)) > bound_s:
            return
        if total_s < round_trip_s[used | before, before, first]:
            round_trip_s[used | before, before, first] = total_s
            behind[used | before, before, first] = here


@njit(cache=True)
def _compute_s(groups: Groups, group: int, first: int, end: int) -> float:  # pragma: no cover
    """Seconds of layers on the slowest device of a group."""
    slowest_s = 0.0
    for device in range(groups.compute_s.shape[1]):
        if group >> device & 1:
            own_s = groups.compute_s[group, device, end] - groups.compute_s[group, device, first]
            slowest_s = max(slowest_s, own_s)
    return slowest_s


@njit(cache=True)
def _share(groups: Groups, first: int, end: int) -> float:  # pragma: no cover
    """The layers' part of the model's state."""
    return float((groups.state_bytes[end] - groups.state_bytes[first]) / max(groups.state_bytes[-1], 1.0))


@njit(cache=True)
def _wait_s(
    groups: Groups, group: int, first: int, end: int, depth: int, round_trip_s: float
) -> float:  # pragma: no cover
    """Seconds from one microbatch to the next where memory holds fewer than ``depth``, each for ``round_trip_s``.

    0 where it holds as many, infinite where it does not hold one.
    """
    held = depth
    states = groups.state_bytes[end] - groups.state_bytes[first]
    activations = groups.activation_bytes[end] - groups.activation_bytes[first]
    for device in range(groups.compute_s.shape[1]):
        if group >> device & 1:
            room = groups.capacity_bytes[device] - states
            each = groups.samples[group, device] * activations
            if room < each or room < 0:
                return np.inf
            if held * each > room:
                held = int(room // each)
    return round_trip_s / held if held < depth else 0.0


@njit(cache=True)
def _unwind(
    behind: Ints, stages: int, used: int, begin: int, group: Ints, first_layer: Ints
) -> None:  # pragma: no cover
    layers = behind.shape[3]
    group[:] = 0
    first = 0
    for stage in range(stages):
        group[stage], first_layer[stage] = begin, first
        here = behind[stages - stage, used, begin, first]
        used, begin, first = used ^ begin, here // layers, here % layers
