"""Division of samples into microbatches and of devices into groups, for strategies that leave both to ropebridge."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import floor

from planner.scenario.cluster import Device
from planner.scenario.scenario import Scenario


def even_microbatches(scenario: Scenario, samples: int, stages: int) -> tuple[int, ...]:
    """Return the sizes of equal microbatches with ``samples`` in total; only the last one may be smaller.

    The size is ``scenario.training.microbatch``. If that is 0, there are about four times as many microbatches as
    stages, which keeps the bubble of 1F1B, (stages - 1) / (microbatches + stages - 1), below 1/5.
    """
    size = scenario.training.microbatch or max(1, samples // (4 * stages))
    whole, rest = divmod(samples, size)
    return (size,) * whole + ((rest,) if rest else ())


def even_cut(samples: int, count: int) -> tuple[int, ...]:
    """Return the sizes of ``count`` microbatches of ``samples`` in total that differ by at most one, largest first."""
    whole, rest = divmod(samples, count)
    return tuple(whole + (index < rest) for index in range(count))


def even_groups(devices: Sequence[Device], count: int) -> list[tuple[Device, ...]]:
    """Return ``count`` groups of consecutive devices whose sizes differ by at most one, larger groups first."""
    bounds = accumulate(even_cut(len(devices), count), initial=0)
    return [tuple(devices[first:end]) for first, end in pairwise(bounds)]


def proportional_parts(total: int, weights: Sequence[float]) -> list[int]:
    """Return integer parts of ``total``, each at least 1, as nearly proportional to the weights as integers can be.

    There is a part for each weight; weights are above zero, and ``total`` is at least their number.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [max(1, floor(each)) for each in exact]
    while sum(parts) < total:
        parts[max(range(len(parts)), key=lambda index: exact[index] - parts[index])] += 1
    while sum(parts) > total:
        several = [index for index, part in enumerate(parts) if part > 1]
        parts[max(several, key=lambda index: parts[index] - exact[index])] -= 1
    return parts
