"""Division of samples into microbatches and parts, for strategies without their own method."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import floor

from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario


def even_microbatches(scenario: Scenario, samples: int, stages: int) -> tuple[int, ...]:
    """Return equal microbatches with ``samples`` in total, the last one smaller if they do not divide.

    Their size is the scenario's ``microbatch`` if it gives one; else there are four for each stage, if there are as
    many samples, which keeps 1F1B's bubble below a fifth.
    """
    size = scenario.training.microbatch or max(1, samples // (4 * stages))
    whole, rest = divmod(samples, size)
    return (size,) * whole + ((rest,) if rest else ())


def even_cut(samples: int, count: int) -> tuple[int, ...]:
    """Return ``samples`` in ``count`` microbatches whose sizes differ by one at most, the largest first."""
    whole, rest = divmod(samples, count)
    return tuple(whole + (index < rest) for index in range(count))


def even_groups(devices: Sequence[Device], count: int) -> list[tuple[Device, ...]]:
    """Return devices in ``count`` groups of neighbours whose sizes differ by one at most, the larger ones first."""
    bounds = accumulate(even_cut(len(devices), count), initial=0)
    return [tuple(devices[first:end]) for first, end in pairwise(bounds)]


def proportional_parts(total: int, weights: Sequence[float]) -> list[int]:
    """Return ``total`` in whole parts, one or more each, as close to the weights' proportions as that allows.

    Args:
        total: Number to divide, at least as large as the number of weights.
        weights: Weights of the parts, each above zero.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [max(1, floor(each)) for each in exact]
    while sum(parts) < total:
        parts[max(range(len(parts)), key=lambda index: exact[index] - parts[index])] += 1
    while sum(parts) > total:
        several = [index for index, part in enumerate(parts) if part > 1]
        parts[max(several, key=lambda index: parts[index] - exact[index])] -= 1
    return parts
