from collections.abc import Mapping
from dataclasses import replace

import pytest

from experiments.benches.planning.adaptation_cases import drawn, usable_cases
from experiments.benches.planning.adaptation_traces import DEVELOP
from experiments.benches.planning.hindsight import possible_gains, starting_plans
from experiments.benches.planning.real_gains import GAINING, MOVING, checks
from experiments.runs.scenario import choose_scenario
from planner.runs.metrics import measure
from sim.simulator import Simulator

Cells = dict[str, str | float | int]

SLOWING: list[Cells] = [
    {"simulated_gain": 1.5, "real_gain": 1.5, "simulated_moves": int(number == 3), "real_moves": 0}
    for number in range(len(GAINING) + len(MOVING))
]
STILL: Cells = {"simulated_gain": 1.0, "real_gain": 1.0, "simulated_moves": 0, "real_moves": 0}


def holding(slowing: list[Cells], drawn_rows: list[Cells]) -> list[bool]:
    return [check.holds for check in checks(slowing, drawn_rows, len(drawn_rows))]


def test_all_bars_hold_where_gains_agree() -> None:
    assert holding(SLOWING, []) == [True] * 3
    assert holding(SLOWING, [STILL] * 6) == [True] * 6


@pytest.mark.parametrize("left", [0, 3])
def test_fewer_cases_than_were_wanted_are_no_result(left: int) -> None:
    found = checks(SLOWING, [STILL] * left, 6)
    assert [check.holds for check in found] == [True] * 3 + [False] + [True] * (2 if left else 0)


@pytest.mark.parametrize(
    ("place", "changed", "missed"),
    [
        (0, {"simulated_gain": 1.04, "real_gain": 1.04}, 0),
        (1, {"simulated_gain": 1.04, "real_gain": 1.04}, 0),
        (2, {"simulated_gain": 1.0, "real_gain": 1.0}, None),
        (3, {"simulated_moves": 0}, 1),
        (3, {"real_gain": 1.56}, 2),
        (3, {"real_gain": 1.44}, 2),
    ],
)
def test_each_bar_of_the_slowing_link_can_be_missed(
    place: int, changed: Mapping[str, float], missed: int | None
) -> None:
    rows = [{**row, **changed} if number == place else row for number, row in enumerate(SLOWING)]
    assert holding(rows, []) == [number != missed for number in range(3)]


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"simulated_gain": 0.96, "real_gain": 0.96}, {4}),
        ({"simulated_gain": 1.2, "real_gain": 1.1}, {5}),
        ({"simulated_gain": 1.1, "real_gain": 0.96}, {4, 5}),
    ],
)
def test_each_bar_of_the_cases_can_be_missed(changed: Mapping[str, float], missed: set[int]) -> None:
    assert holding(SLOWING, [STILL, {**STILL, **changed}]) == [number not in missed for number in range(6)]


def test_cases_are_drawn_in_an_order_that_can_be_had_again() -> None:
    found = usable_cases((DEVELOP,), lambda text: None)
    said: list[str] = []
    once, again = (drawn(found, len(found), 7, said.append) for _ in range(2))
    names = [(case.scenario.name, case.pair.name) for case in once]
    assert names == [(case.scenario.name, case.pair.name) for case in again]
    assert sorted(names) == sorted((case.scenario.name, case.pair.name) for case in found)
    assert names != [(case.scenario.name, case.pair.name) for case in found]
    assert drawn(found, 3, 7, said.append) == once[:3]
    assert said == ["seeds 7 to 7; the same cases with --seed 7"] * 3


def test_the_best_plan_in_hindsight_comes_first_with_its_throughput() -> None:
    scenario = choose_scenario("two-regions")
    plans_per_s = starting_plans(scenario, 60.0)
    assert [*plans_per_s.values()] == sorted(plans_per_s.values(), reverse=True)
    best, best_per_s = next(iter(plans_per_s.items()))
    assert measure(Simulator(duration_s=60.0).run(scenario, best, None, 10**9)).samples_per_s == best_per_s
    assert possible_gains(scenario, [best], 60.0).free == pytest.approx(1.0)
    # The best plan of each window is never worse than the first one of all.
    assert possible_gains(scenario, [*plans_per_s, replace(best, compression="none")], 60.0).free >= 1.0
