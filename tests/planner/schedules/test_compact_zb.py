"""What compact zero bubble and the portfolio choose."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.benches.planning.pipeline_families import FAMILIES, Times, family, problem_of
from planner.schedules import SCHEDULES, WHOLE
from planner.schedules.kernel.bounds import lower_bound_s
from planner.schedules.kernel.problem import BACKWARD, BACKWARD_WEIGHT, Orders, SchedulingProblem
from planner.schedules.kernel.timing import finish_s


def own_depth(problem: SchedulingProblem, factor: int) -> SchedulingProblem:
    depths = [factor * (problem.stages - stage) - factor + 1 for stage in range(problem.stages)]
    return replace(problem, in_flight=tuple(depths))


# Stages, microbatches, depth and seed: searches of large problems take seconds.
SIZES = [
    (4, 8, 4, 0),
    pytest.param((6, 10, 5, 0), marks=pytest.mark.slow),
    pytest.param((6, 10, 5, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_never_later_than_1f1b_and_zb_h1_in_the_same_memory(name: str, size: tuple[int, int, int, int]) -> None:
    problem = family(name, *size)
    simple = [finish_s(problem, SCHEDULES["1f1b"](own_depth(problem, factor))) for factor in (1, 2)]
    simple += [finish_s(problem, SCHEDULES[each](problem)) for each in ("zb-h1", "zb-h2")]
    for each in ("compact-zb", "portfolio"):
        found_s = finish_s(problem, SCHEDULES[each](problem))
        assert found_s <= min(simple) * (1 + 1e-9)
        assert found_s >= lower_bound_s(problem) * (1 - 1e-9)


def test_a_slow_link_is_hidden_where_memory_allows() -> None:
    stages = [Times(1, 1, 1, 0.5, 10 if boundary == 1 else 0) for boundary in range(4)]
    problem = problem_of(stages, [1] * 64, np.inf)
    found_s = finish_s(problem, SCHEDULES["compact-zb"](problem))
    assert found_s == pytest.approx(lower_bound_s(problem), rel=0.02)
    assert finish_s(problem, SCHEDULES["zb-h1"](problem)) > 2 * found_s


def test_backwards_are_split_only_where_that_gains() -> None:
    problem = problem_of([Times(2, 2, 2, 0, 3), Times(2, 2, 2, 0, 3), Times(2, 2, 2)], [1] * 6, np.inf)
    orders = SCHEDULES["compact-zb"](problem)
    kinds = orders.kind.tolist()
    assert kinds.count(BACKWARD) > 0
    assert kinds.count(BACKWARD_WEIGHT) > 0
    # The first stage's gradients go nowhere: splitting them gains nothing at the end.
    assert [str(action) for action in orders.actions(0)][-1] == "0B5"


def test_the_portfolio_does_not_split_where_that_gains_nothing() -> None:
    problem = problem_of([Times(1, 1, 1)], [1] * 4, np.inf)
    assert not (SCHEDULES["portfolio"](problem).kind == BACKWARD_WEIGHT).any()


@pytest.mark.parametrize(("workers", "named"), [((0, 1, 0, 1), "interleaved-1f1b"), ((0, 1, 1, 0), "zb-v")])
def test_the_portfolio_knows_every_placement(workers: tuple[int, ...], named: str) -> None:
    problem = problem_of([Times(1, 1, 1, 0, 1)] * 4, [1] * 8, np.inf)
    problem = replace(problem, workers=workers, capacity_bytes=np.full(2, np.inf))
    best_s = finish_s(problem, SCHEDULES["portfolio"](problem))
    assert best_s <= finish_s(problem, SCHEDULES[named](problem))


def test_unequal_microbatches_are_taken_in_a_better_order() -> None:
    problem = family("unequal microbatches", 3, 6, 3)
    orders = SCHEDULES["compact-zb"](problem)
    entering = [action.microbatch for action in orders.actions(0) if action.kind == "F"]
    assert sorted(entering) == list(range(6)) != entering
    assert finish_s(problem, orders) < 0.95 * finish_s(problem, SCHEDULES["zb-h1"](problem))


def test_alike_microbatches_keep_their_order() -> None:
    problem = family("two slow hops", 6, 12, 6)
    orders: Orders = SCHEDULES["compact-zb"](problem)
    for stage in range(problem.stages):
        for kinds in ((0,), (1, 2), (1, 3)):
            own = (orders.stage == stage) & np.isin(orders.kind, kinds)
            assert orders.microbatch[own].tolist() == list(range(12))


def test_only_whole_schedules_never_split() -> None:
    problem = family("slow hop", 4, 8, 6)
    for name in ("1f1b", "gpipe", "zb-h1", "zb-h2", "compact-zb", "interleaved-1f1b"):
        splits = (SCHEDULES[name](problem).kind == BACKWARD_WEIGHT).any()
        assert splits == (name not in WHOLE)
