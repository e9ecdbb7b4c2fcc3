"""The optimum, against trying everything; and compact zero bubble against the optimum."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from experiments.benches.planning.pipeline_families import FAMILIES, Times, family, problem_of
from planner.plan.actions import Action, Kind
from planner.schedules import SCHEDULES
from planner.schedules.kernel.bounds import lower_bound_s
from planner.schedules.kernel.problem import Orders, SchedulingProblem, is_within_limits
from planner.schedules.kernel.timing import finish_s
from planner.schedules.optimal import solve
from traces.common.errors import InputError


@pytest.fixture
def solver() -> None:
    pytest.importorskip("ortools", reason="the extra 'solve' is not installed")


UNLIKE = [Times(7, 8, 5, 2, 3), Times(9, 12, 6, 1, 9), Times(6, 5, 4)]
TINY = {
    "two stages": problem_of(UNLIKE[:2], [1] * 3, np.inf),
    "three stages": problem_of(UNLIKE, [1] * 2, np.inf),
    "little memory": problem_of(UNLIKE[:2], [1] * 3, [2, 1]),
    "small depth": replace(problem_of(UNLIKE[:2], [1] * 3, np.inf), in_flight=(2, 1)),
    "inputs are freed early": replace(
        problem_of(UNLIKE[:2], [1] * 3, [2, 1.5]), weight_bytes=np.full((2, 3), 0.5), activation_bytes=np.ones((2, 3))
    ),
    # Backwards hold three times what waits for them: room for two in flight, and for one backward or nearly two.
    "recomputed": replace(
        problem_of(UNLIKE[:2], [1] * 3, [4, 5.5]), weight_bytes=np.full((2, 3), 3.0), activation_bytes=np.ones((2, 3))
    ),
    "unequal microbatches": problem_of(UNLIKE[:2], [3, 1], np.inf),
    "one worker": replace(
        problem_of(UNLIKE[:2], [1] * 2, np.inf), workers=(0, 0), capacity_bytes=np.array([3.0]), in_flight=(2, 1)
    ),
}


def sequences(chains: Sequence[Sequence[Action]], alike: bool) -> Iterator[tuple[Action, ...]]:
    """Every way to interleave chains of actions; alike microbatches stay in order, which loses nothing."""
    if not any(chains):
        yield ()
    for index, chain in enumerate(chains):
        if chain and not (alike and any(is_before(action, chain[0]) for other in chains for action in other)):
            rest = [*chains[:index], chain[1:], *chains[index + 1 :]]
            yield from ((chain[0], *others) for others in sequences(rest, alike))


def is_before(one: Action, other: Action) -> bool:
    return (one.stage, one.kind) == (other.stage, other.kind) and one.microbatch < other.microbatch


def best_of_all_s(problem: SchedulingProblem) -> float:
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    rows = []
    for worker in range(problem.worker_count):
        pairs = list(product(problem.stages_of(worker), range(problem.microbatches)))
        chains = [[Action(stage, kind, microbatch) for kind in kinds] for stage, microbatch in pairs]
        rows.append(list(sequences(chains, problem.has_equal_microbatches)))
    least_s = np.inf
    for chosen in product(*rows):
        orders = Orders.from_actions(chosen)
        if is_within_limits(problem, orders):
            try:
                least_s = min(least_s, finish_s(problem, orders))
            except InputError:
                continue
    return least_s


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("name", sorted(TINY))
def test_nothing_is_better_than_the_optimum(name: str) -> None:
    problem = TINY[name]
    solution = solve(problem)
    least_s = best_of_all_s(problem)
    assert solution.is_proved
    assert solution.makespan_s == pytest.approx(least_s)
    assert solution.bound_s == pytest.approx(least_s, rel=1e-4)
    assert lower_bound_s(problem) <= least_s
    assert finish_s(problem, SCHEDULES["optimal"](problem)) == pytest.approx(least_s)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("scale", [1e-3, 0.001234567, np.pi])
def test_times_in_seconds_come_to_whole_ticks(scale: float) -> None:
    problem = family("slow hop", 4, 8, 4)
    names = ("forward_s", "backward_input_s", "backward_weight_s", "forward_transmission_s", "backward_transmission_s")
    times_s = {name: getattr(problem, name) * scale for name in (*names, "forward_latency_s", "backward_latency_s")}
    solution = solve(replace(problem, **times_s))
    assert solution.is_proved
    assert solution.makespan_s == pytest.approx(576 * scale)


@pytest.mark.usefixtures("solver")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"unequal microbatches"}))
def test_compact_zb_is_close_to_the_optimum(name: str, seed: int) -> None:
    problem = family(name, 4, 12, 5, seed)
    solution = solve(problem, limit_s=5)
    assert finish_s(problem, SCHEDULES["compact-zb"](problem)) <= solution.bound_s * 1.02
    assert finish_s(problem, SCHEDULES["portfolio"](problem)) <= solution.bound_s * 1.02


def test_without_the_solver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(InputError, match=r"schedule 'optimal' needs OR-tools; install 'ropebridge\[solve\]'"):
        solve(TINY["two stages"])
