"""What holds for every schedule on every problem."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.benches.planning.pipeline_families import family
from experiments.benches.simulation.yardsticks import (
    makespan_s,
)
from planner.schedules import HOLD_ALL, SCHEDULES, WHOLE
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.kernel.bounds import lower_bound_s
from planner.schedules.kernel.problem import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Orders,
    SchedulingProblem,
    is_within_limits,
    peak_bytes,
)
from planner.schedules.kernel.timing import finish_s
from traces.common.errors import InputError

STRAIGHT = ("1f1b", "compact-zb", "gpipe", "portfolio", "zb-h1", "zb-h2")
LOOPED = ("compact-zb", "gpipe", "interleaved-1f1b", "portfolio")
V_SHAPED = ("compact-zb", "gpipe", "portfolio", "zb-v")

examples = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw: st.DrawFn, placement: str) -> SchedulingProblem:
    """Anything that a plan can come to: whole and broken times, unequal microbatches, tight memory, small depths."""
    workers = placed(placement, draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    stages, microbatches = len(workers), draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole, alike = draw(st.booleans()), draw(st.booleans())

    def table(count: int, least: int, most: int) -> np.ndarray:
        sizes = np.ones(microbatches) if alike else random.integers(1, 4, microbatches)
        values = np.outer(random.integers(least, most + 1, count), sizes).astype(np.float64)
        return values if whole else values * random.uniform(0.5, 1.0, (count, 1))

    activation_bytes = table(stages, 1, 5)
    # Above 1, stages recompute: their backwards hold more than what waited for them.
    weight_bytes = activation_bytes * draw(st.sampled_from([0.0, 0.5, 1.0, 1.5, 4.0]))
    recomputed_bytes = np.zeros(max(workers) + 1)
    np.maximum.at(recomputed_bytes, list(workers), (weight_bytes - activation_bytes).max(axis=1))
    needed_bytes = np.bincount(workers, activation_bytes.max(axis=1)) + recomputed_bytes
    return SchedulingProblem(
        workers,
        tuple(random.integers(1, 8, stages).tolist()),
        *(table(stages, 1, 9) for _ in range(3)),
        table(stages - 1, 0, 6),
        table(stages - 1, 0, 6),
        random.integers(0, 30, stages - 1).astype(np.float64),
        random.integers(0, 30, stages - 1).astype(np.float64),
        activation_bytes,
        weight_bytes,
        needed_bytes * draw(st.sampled_from([1.0, 1.5, 3.0, np.inf])),
    )


def placed(placement: str, workers: int, rounds: int) -> tuple[int, ...]:
    down = tuple(range(workers))
    return {"straight": down, "looped": down * rounds, "v": down + down[::-1]}[placement]


def refuse_what_is_no_order(problem: SchedulingProblem, orders: Orders) -> None:
    """Every stage does F and B, or F, I and W, of every microbatch once, on its own worker, and F before the rest."""
    found = Counter(zip(orders.stage.tolist(), orders.microbatch.tolist(), orders.kind.tolist(), strict=True))
    assert set(found.values()) == {1}
    for stage in range(problem.stages):
        for microbatch in range(problem.microbatches):
            kinds = {kind for s, m, kind in found if (s, m) == (stage, microbatch)}
            assert kinds in ({FORWARD, BACKWARD}, {FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})
    for worker in range(problem.worker_count):
        assert {action.stage for action in orders.actions(worker)} == set(problem.stages_of(worker))


def hold_to_everything(names: Sequence[str], problem: SchedulingProblem) -> None:
    bound_s = lower_bound_s(problem)
    makespans_s = {}
    for name in names:
        orders = SCHEDULES[name](problem)
        refuse_what_is_no_order(problem, orders)
        if name in WHOLE:
            assert set(orders.kind.tolist()) == {FORWARD, BACKWARD}
        makespans_s[name] = finish_s(problem, orders)
        assert makespans_s[name] == pytest.approx(makespan_s(problem, orders)), name
        if name not in HOLD_ALL:
            assert is_within_limits(problem, orders), name
            assert makespans_s[name] >= bound_s * (1 - 1e-9), name
    limited = [makespans_s[name] for name in names if name not in HOLD_ALL]
    assert makespans_s["compact-zb"] <= min(limited) * (1 + 1e-9)
    assert makespans_s["portfolio"] <= min(limited) * (1 + 1e-9)


@examples
@given(problems("straight"))
def test_one_stage_a_worker(problem: SchedulingProblem) -> None:
    hold_to_everything(STRAIGHT, problem)


@examples
@given(problems("looped"))
def test_stages_round_the_workers(problem: SchedulingProblem) -> None:
    hold_to_everything(LOOPED, problem)


@examples
@given(problems("v"))
def test_stages_in_a_v(problem: SchedulingProblem) -> None:
    hold_to_everything(V_SHAPED, problem)


@examples
@given(st.sampled_from(["straight", "looped", "v"]).flatmap(problems), st.booleans())
def test_the_dynamic_rule_never_deadlocks(problem: SchedulingProblem, split: bool) -> None:
    orders = dynamic_orders(problem, split)
    refuse_what_is_no_order(problem, orders)
    assert is_within_limits(problem, orders)
    assert finish_s(problem, orders) == pytest.approx(makespan_s(problem, orders))


@pytest.mark.parametrize("name", [*STRAIGHT, "interleaved-1f1b"])
def test_the_same_problem_has_always_the_same_orders(name: str) -> None:
    problem = family("slow hop", 4, 8, 4)
    first, second = SCHEDULES[name](problem), SCHEDULES[name](problem)
    for column in ("first_action", "kind", "stage", "microbatch"):
        np.testing.assert_array_equal(getattr(first, column), getattr(second, column))


@pytest.mark.parametrize("name", ["1f1b", "compact-zb", "portfolio", "zb-h1", "zb-h2"])
def test_a_microbatch_that_does_not_fit_is_refused(name: str) -> None:
    problem = family("slow hop", 4, 8, 4)
    with pytest.raises(InputError, match=r"memory|room"):
        SCHEDULES[name](replace(problem, capacity_bytes=peak_bytes(problem, SCHEDULES["gpipe"](problem)) * 0.01))
