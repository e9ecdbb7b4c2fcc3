"""The published schedules against their papers' formulas and their own pictures, on equal stages without transfers."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from experiments.benches.planning.pipeline_families import Times, problem_of
from planner.schedules import SCHEDULES
from planner.schedules.kernel.problem import KINDS, Orders, SchedulingProblem, peak_bytes, peak_live
from planner.schedules.kernel.timing import finish_s, start_times_s
from traces.common.errors import InputError

SIZES = [(1, 3), (2, 4), (3, 4), (4, 8), (4, 16), (8, 32)]
UNITS = [(1, 1, 1), (3, 3, 2), (2, 3, 2)]


def even(stages: int, microbatches: int, unit: Sequence[float] = (1, 1, 1)) -> SchedulingProblem:
    return problem_of([Times(*unit)] * stages, [1] * microbatches, np.inf)


def placed(problem: SchedulingProblem, workers: Sequence[int]) -> SchedulingProblem:
    capacity_bytes = np.full(max(workers) + 1, np.inf)
    return replace(problem, workers=tuple(workers), capacity_bytes=capacity_bytes)


def own_depth(problem: SchedulingProblem) -> SchedulingProblem:
    return replace(problem, in_flight=tuple(range(problem.stages, 0, -1)))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("unit", UNITS)
def test_gpipe_and_1f1b(stages: int, microbatches: int, unit: tuple[int, int, int]) -> None:
    problem = own_depth(even(stages, microbatches, unit))
    expected_s = (microbatches + stages - 1) * sum(unit)
    whole = SCHEDULES["1f1b"](problem)
    assert finish_s(problem, SCHEDULES["gpipe"](problem)) == finish_s(problem, whole) == expected_s
    assert peak_live(problem, whole).tolist() == np.minimum(problem.in_flight, microbatches).tolist()


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("unit", UNITS)
def test_zb_h1_has_a_third_of_the_bubble_within_the_memory_of_1f1b(
    stages: int, microbatches: int, unit: tuple[int, int, int]
) -> None:
    problem = even(stages, microbatches, unit)
    orders = SCHEDULES["zb-h1"](problem)
    forward_s, input_s, weight_s = unit
    assert finish_s(problem, orders) == microbatches * sum(unit) + (stages - 1) * (forward_s + input_s - weight_s)
    assert peak_bytes(problem, orders).max() == min(stages, microbatches)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (3, 5), (4, 8), (4, 16), (8, 32)])
def test_zb_h2_never_idles_within_twice_the_memory(stages: int, microbatches: int) -> None:
    problem = even(stages, microbatches)
    orders = SCHEDULES["zb-h2"](problem)
    assert finish_s(problem, orders) == stages - 1 + 3 * microbatches
    assert idle_s(problem, orders) == 0
    assert peak_bytes(problem, orders).max() == 2 * stages - 1


@pytest.mark.parametrize(("workers", "microbatches"), [(1, 1), (2, 4), (3, 5), (4, 8), (8, 16)])
def test_zb_v_never_idles_within_the_memory_of_1f1b(workers: int, microbatches: int) -> None:
    problem = placed(even(2 * workers, microbatches), [*range(workers), *reversed(range(workers))])
    orders = SCHEDULES["zb-v"](problem)
    assert finish_s(problem, orders) == workers - 1 + 6 * microbatches
    assert idle_s(problem, orders) == 0
    # 2P activations of stages half as large.
    assert peak_bytes(problem, orders).max() <= 2 * workers


@pytest.mark.parametrize(("workers", "rounds", "microbatches"), [(2, 2, 4), (3, 2, 6), (4, 3, 8), (4, 2, 16)])
def test_interleaved_1f1b_has_less_bubble(workers: int, rounds: int, microbatches: int) -> None:
    problem = placed(even(workers * rounds, microbatches), list(range(workers)) * rounds)
    orders = SCHEDULES["interleaved-1f1b"](problem)
    assert finish_s(problem, orders) == 3 * (microbatches * rounds + workers - 1)


def idle_s(problem: SchedulingProblem, orders: Orders) -> float:
    """How long workers idle between their first and their last action."""
    starts_s = start_times_s(problem, orders)
    whole_s = problem.backward_input_s + problem.backward_weight_s
    table_s = np.stack([problem.forward_s, whole_s, problem.backward_input_s, problem.backward_weight_s])
    ends_s = starts_s + table_s[orders.kind, orders.stage, orders.microbatch]
    idle = 0.0
    for first, end in zip(orders.first_action[:-1], orders.first_action[1:], strict=True):
        idle += ends_s[end - 1] - starts_s[first] - (ends_s - starts_s)[first:end].sum()
    return idle


WHOLE, SPLIT = Times(1, 0.5, 0.5), Times(1, 1, 1)

# For each picture: times of all stages, the stages' workers, microbatches, memory.
PICTURES = {
    "gpipe": (WHOLE, [0, 1, 2], 4, np.inf),
    "1f1b": (WHOLE, [0, 1, 2], 4, np.inf),
    "interleaved-1f1b": (WHOLE, [0, 1, 0, 1], 4, np.inf),
    "zb-h1": (SPLIT, [0, 1, 2], 4, np.inf),
    "zb-h2": (SPLIT, [0, 1, 2], 6, np.inf),
    "zb-v": (SPLIT, [0, 1, 1, 0], 4, np.inf),
    "compact-zb": (Times(1, 1, 1, latency_s=1), [0, 1, 2], 4, 4.0),
}


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_the_pictures_in_the_docstrings(name: str) -> None:
    times, workers, microbatches, memory = PICTURES[name]
    problem = placed(problem_of([times] * len(workers), [1] * microbatches, memory), workers)
    problem = replace(problem, capacity_bytes=np.full(problem.worker_count, memory))
    problem = own_depth(problem) if name == "1f1b" else problem
    assert drawn(name) == picture(problem, SCHEDULES[name](problem))


def drawn(name: str) -> list[list[str]]:
    documentation = inspect.getdoc(SCHEDULES[name]) or ""
    lines = [line.split() for line in documentation.splitlines()]
    return [line[2:] for line in lines if line[:1] in (["stage"], ["worker"]) and line[1].isdigit()]


def picture(problem: SchedulingProblem, orders: Orders) -> list[list[str]]:
    """A cell for each second: what each worker begins, or dots."""
    starts_s = start_times_s(problem, orders)
    one_stage = problem.stages == problem.worker_count
    rows = []
    for worker in range(problem.worker_count):
        row = [".." if one_stage else "..."] * round(finish_s(problem, orders))
        for index in range(orders.first_action[worker], orders.first_action[worker + 1]):
            stage = "" if one_stage else str(orders.stage[index])
            row[round(starts_s[index])] = f"{stage}{KINDS[orders.kind[index]]}{orders.microbatch[index]}"
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("name", "workers", "said"),
    [
        ("1f1b", [0, 1, 1, 0], "4 stages on 2 workers"),
        ("zb-h1", [0, 1, 0, 1], "4 stages on 2 workers"),
        ("zb-h2", [0, 0], "2 stages on 1 workers"),
        ("zb-v", [0, 1, 0, 1], "stages lie on workers 0, 1, 0, 1"),
        ("interleaved-1f1b", [0, 1, 1, 0], "stages lie on workers 0, 1, 1, 0"),
    ],
)
def test_a_placement_that_a_schedule_does_not_know_is_refused(name: str, workers: list[int], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        SCHEDULES[name](placed(even(len(workers), 4), workers))
    assert f"schedule '{name}'" in str(caught.value)


def test_memory_and_depth_clip_a_published_schedule() -> None:
    problem = even(4, 8)
    tight = replace(problem, capacity_bytes=np.array([3.0, 2.0, 4.0, 1.0]))
    for name in ("1f1b", "zb-h1", "zb-h2"):
        assert np.all(peak_bytes(tight, SCHEDULES[name](tight)) <= tight.capacity_bytes)
    shallow = replace(problem, in_flight=(2, 3, 1, 4))
    for name in ("1f1b", "zb-h1", "zb-h2"):
        # A stage cannot run further ahead than the one before it.
        assert peak_live(shallow, SCHEDULES[name](shallow)).tolist() == [2, 2, 1, 1]
