"""The layers at which candidate pipelines may be divided into stages: all, or some of a model with many layers.

The time of the dynamic programmes grows with the square of the number of these layers. The local search then moves the
boundaries of the best candidates layer by layer (`planner.systems.auto.local_search.improve`).
"""

from functools import lru_cache

import numpy as np

from planner.cost.layers import range_memory
from planner.scenario.scenario import Scenario
from planner.step.graph import Floats, Ints

# Most parts of a model between which candidates are divided.
MOST_PARTS = 48


@lru_cache(maxsize=64)
def cut_points(scenario: Scenario) -> Ints:
    """Return the layers at which a stage may begin, followed by the number of layers, [parts + 1].

    With more than `MOST_PARTS` layers, they form so many parts of about equally many layers, each of which ends with
    the smallest output nearby.
    """
    layers = scenario.model.layers
    if len(layers) <= MOST_PARTS:
        return np.arange(len(layers) + 1)
    # Layers that could end a part; the last layer ends the last one.
    groups = np.array_split(np.arange(1, len(layers)), MOST_PARTS - 1)
    cuts = [0, *(_least_sent(group, scenario) for group in groups), len(layers)]
    return np.array(cuts)


def at_cut_points(of_layers: Floats, scenario: Scenario) -> Floats:
    """Return the entries, along the last axis, of the layers that end a part; the array itself if all of them do."""
    ends = cut_points(scenario)[1:] - 1
    return of_layers if len(ends) == of_layers.shape[-1] else of_layers.take(ends, axis=-1)


def _least_sent(ends: Ints, scenario: Scenario) -> int:
    """Return the end, among those of a group, whose layer sends the fewest bytes; the middle one of several."""
    sent_bytes = np.array([scenario.model.layers[end - 1].output_bytes for end in ends.tolist()])
    least = ends[sent_bytes == sent_bytes.min()]
    return int(least[len(least) // 2])


@lru_cache(maxsize=4096)
def part_memory(scenario: Scenario, samples: int, degree: int = 1, *, recompute: bool = False) -> tuple[Floats, Floats]:
    """Return the arrays of `planner.cost.layers.range_memory` for ranges between cut points, [parts + 1, parts + 1]."""
    ranges = np.ix_(cut_points(scenario), cut_points(scenario))
    resident, saved = range_memory(scenario, samples, degree, recompute=recompute)
    return resident[ranges], saved[ranges]
