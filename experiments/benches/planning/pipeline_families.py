"""Generates pipelines to schedule, in families: equal and unequal stages, slow links, unequal memory or microbatches.

An action, forward or gradient, takes about 10 units of time; a microbatch of size 1 takes one unit of memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from planner.schedules.kernel.problem import Floats, SchedulingProblem


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a stage and the link to the next stage take for a microbatch of size 1; latency is per transfer."""

    forward_s: float = 1.0
    backward_input_s: float = 1.0
    backward_weight_s: float = 1.0
    transmission_s: float = 0.0
    latency_s: float = 0.0


def problem_of(stages: Sequence[Times], sizes: Sequence[float], memory: Sequence[float] | float) -> SchedulingProblem:
    """Return the scheduling problem of a pipeline with one stage a worker.

    Args:
        stages: Times of each stage.
        sizes: Size of each microbatch: its time and memory are this many times those of a microbatch of size 1.
        memory: Most microbatches of size 1 that each worker can hold, from the start of a microbatch's forward to the
            end of its weight gradient.
    """

    def scaled(name: str, count: int) -> Floats:
        return np.outer([getattr(stage, name) for stage in stages[:count]], sizes)

    latency_s = np.array([stage.latency_s for stage in stages[:-1]])
    transmission_s = scaled("transmission_s", len(stages) - 1)
    held_bytes = np.tile(np.asarray(sizes, dtype=np.float64), (len(stages), 1))
    return SchedulingProblem(
        tuple(range(len(stages))),
        (len(sizes),) * len(stages),
        scaled("forward_s", len(stages)),
        scaled("backward_input_s", len(stages)),
        scaled("backward_weight_s", len(stages)),
        transmission_s,
        transmission_s,
        latency_s,
        latency_s,
        held_bytes,
        held_bytes,
        np.broadcast_to(np.asarray(memory, dtype=np.float64), (len(stages),)).copy(),
    )


def family(name: str, stages: int, microbatches: int, memory: int, seed: int = 0) -> SchedulingProblem:
    """Return one of `FAMILIES`, drawn with a seed; each stage has a worker, which can hold ``memory`` microbatches."""
    random = Random(seed + 100 * stages + microbatches)
    times, memories, sizes = FAMILIES[name](random, stages), [memory] * stages, [1] * microbatches
    if name == "unequal memory":
        memories = [max(2, memory + random.randint(-2, 3) - stage // 2) for stage in range(stages)]
    if name == "unequal microbatches":
        sizes = [random.randint(1, 3) for _ in range(microbatches)]
        memories = [2 * memory] * stages
    return problem_of(times, sizes, memories)


def _uniform(random: Random, stages: int) -> list[Times]:
    return [Times(10, 10, 10)] * stages


def _latency(random: Random, stages: int) -> list[Times]:
    return [Times(10, 10, 10, 0, 4)] * stages


def _unlike(random: Random, stages: int) -> list[Times]:
    forwards = [random.randint(7, 13) for _ in range(stages)]
    return [Times(f, random.randint(f - 1, f + 3), random.randint(f - 3, f), 0, random.randint(1, 5)) for f in forwards]


def _slow_hop(random: Random, stages: int) -> list[Times]:
    slow = {stages // 2 - 1: (8, 50)}
    return _with_hops(random, stages, slow)


def _two_slow_hops(random: Random, stages: int) -> list[Times]:
    hops = {stages // 3 - 1, 2 * stages // 3 - 1}
    return _with_hops(random, stages, {hop: (random.randint(4, 12), random.randint(20, 70)) for hop in sorted(hops)})


def _with_hops(random: Random, stages: int, slow: dict[int, tuple[int, int]]) -> list[Times]:
    forwards = [random.randint(7, 13) for _ in range(stages)]
    return [Times(f, f + 1, f - 1, *slow.get(stage, (1, 1))) for stage, f in enumerate(forwards)]


FAMILIES: dict[str, Callable[[Random, int], list[Times]]] = {
    "uniform": _uniform,
    "latency": _latency,
    "unlike stages": _unlike,
    "slow hop": _slow_hop,
    "two slow hops": _two_slow_hops,
    "unequal memory": _unlike,
    "unequal microbatches": _unlike,
}
