"""How near the closed form of a round comes where every pair of neighbours has a full-duplex link of its own.

Random pipelines of 2 to 5 stages and 4 to 32 microbatches: forward 0.5 to 2 s, backward about twice as much, transfers
0 to 2.5 s, no gradient sums; depths 2(P - p) - 1. The exact time is that of the compiled 1F1B schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from experiments.benches.planning.pipeline_families import Times, problem_of
from planner.schedules.kernel.timing import finish_s
from planner.schedules.one_f_one_b import one_f_one_b
from planner.systems.asteroid.round_latency import RoundStep, dominant_step, round_latency_s
from planner.systems.asteroid.strategy import asteroid_depth, plain_depth


@dataclass(frozen=True, slots=True)
class ClosedFormErrors:
    """Errors relative to the exact time, of each instance.

    Attributes:
        published: Of the published form.
        corrected: Of the form corrected for full duplex.
        transfer_dominates: Whether a communication step is the dominant one.
        plain_depth_ratios: Exact time with depths P - p over that with 2(P - p) - 1.
    """

    published: Sequence[float]
    corrected: Sequence[float]
    transfer_dominates: Sequence[bool]
    plain_depth_ratios: Sequence[float]


def closed_form_errors(instances: int, seed: int = 0) -> ClosedFormErrors:
    """Return the errors over so many random pipelines."""
    random = np.random.default_rng(seed)
    published, corrected, dominated, slower = [], [], [], []
    for _ in range(instances):
        count, microbatches = int(random.integers(2, 6)), int(random.integers(4, 33))
        forward_s = random.uniform(0.5, 2, count)
        backward_s = 2 * forward_s * random.uniform(0.9, 1.1, count)
        transfer_s = [*random.uniform(0, 2.5, count - 1), 0.0]
        stages = [Times(f, b / 2, b / 2, x) for f, b, x in zip(forward_s, backward_s, transfer_s, strict=True)]
        problem = problem_of(stages, [1.0] * microbatches, np.inf)
        exact_s, shallow_s = (
            finish_s(each, one_f_one_b(each))
            for each in (
                replace(problem, in_flight=tuple(depth(count - index) for index in range(count)))
                for depth in (asteroid_depth, plain_depth)
            )
        )
        steps: list[RoundStep] = []
        for f, b, x in zip(forward_s, backward_s, transfer_s, strict=True):
            steps += [RoundStep(float(f), float(b)), RoundStep(float(x), float(x), is_transfer=True)]
        steps.pop()
        published.append(round_latency_s(steps, microbatches) / exact_s - 1)
        corrected.append(round_latency_s(steps, microbatches, duplex=True) / exact_s - 1)
        dominated.append(steps[dominant_step(steps, microbatches, duplex=False)].is_transfer)
        slower.append(shallow_s / exact_s)
    return ClosedFormErrors(published, corrected, dominated, slower)


def describe_errors(errors: Sequence[float]) -> str:
    """Return mean and range of errors in words."""
    return f"{mean(errors):+.1%} in the mean, {min(errors):+.1%} to {max(errors):+.1%}"
