import json
import math
import os
from pathlib import Path

import pytest

from experiments.benches.planning import planner as bench
from experiments.benches.planning.planner import (
    OURS,
    OURS_BY_CLOSED_FORM,
    LimitedProcess,
    PlannerCase,
    measure_planner,
    plan_and_score,
)
from experiments.benches.planning.planner_fleets import WIDE_FLEETS, PublishedFleet, wide_scenario
from experiments.benches.result import Row
from tests.helpers.scenarios.fleet_files import write_fleet_files

SMALL = PublishedFleet(4, 4, 1.0, 2.0, 0.5, 3.0)


def be_quiet(_: str) -> None:
    pass


def test_a_plan_is_scored_on_both_terms(tmp_path: Path) -> None:
    row = plan_and_score(PlannerCase("ddp", SMALL, write_fleet_files(tmp_path)))
    assert row["problem"] == ""
    assert row["fits_judge"] == "yes"
    assert float(row["search_s"]) > 0
    # 128 samples a device: the slow kind takes 0.09 s a sample and layer; sums take what both kinds of terms say.
    assert float(row["judge_per_s"]) == pytest.approx(1 / (128 * 0.36), rel=0.02)
    assert float(row["ours_per_s"]) == pytest.approx(1 / (128 * 0.36), rel=0.02)


def test_a_refusal_is_a_row(tmp_path: Path) -> None:
    files = write_fleet_files(tmp_path)
    sizes = json.loads(files.sizes.read_text())
    sizes["Toy-1"]["1"]["2"]["act_mem_bytes"] = 10**12
    files.sizes.write_text(json.dumps(sizes))
    row = plan_and_score(PlannerCase("greedy", SMALL, files))
    assert (row["judge_per_s"], row["ours_per_s"], row["fits_judge"]) == (0, 0, "")
    assert "no split fits into memory: layer 2" in str(row["problem"])


def test_strategies_work_in_a_process_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PUBLISHED_FLEETS", (SMALL,))
    monkeypatch.setattr(bench, "STRATEGIES", {"ddp": None, "greedy": None})
    monkeypatch.setattr(bench, "QUICK_LIMIT_S", 120.0)
    result = measure_planner(True, be_quiet, write_fleet_files(tmp_path))
    assert [row["strategy"] for row in result.rows] == ["best published planner, carried over", "ddp", "greedy"]
    assert [row["fleet"] for row in result.rows] == [SMALL.name] * 3
    assert [row["problem"] for row in result.rows] == [""] * 3
    # Ours is not among them.
    assert result.checks == []


def row_of(strategy: str, fleet: str, judge_per_s: float, ours_per_s: float, fits: str = "yes") -> Row:
    numbers = {"search_s": 2.5, "judge_per_s": judge_per_s, "ours_per_s": ours_per_s}
    return {"fleet": fleet, "strategy": strategy, **numbers, "fits_judge": fits, "problem": ""}


def values(rows: list[Row]) -> list[tuple[float, bool]]:
    return [(check.value, check.holds) for check in bench._checks(rows, (SMALL,))]


def test_checks_hold_our_strategy_to_the_figures_carried_over() -> None:
    other = row_of("ddp", SMALL.name, 0.3, 0.2)
    assert values([other]) == []
    # The plan that users get: by the closed form as good as the best one known, quick, and the best by our evaluator.
    assert values([other, row_of(OURS, SMALL.name, 0.1, 0.4)]) == [(0.1, False), (2.5, True), (2.0, True)]
    assert values([other, row_of(OURS, SMALL.name, 0.6, 0.1)]) == [(0.6, True), (2.5, True), (0.5, False)]
    # So is one that is found by the closed form, which is no rival of its own.
    asked = OURS_BY_CLOSED_FORM
    assert values([other, row_of(asked, SMALL.name, 0.6, 0.1)]) == [(0.6, True), (2.5, True)]
    assert values([other, row_of(asked, SMALL.name, 0.4, 0.1)])[0] == (0.4, False)
    assert values([row_of(asked, SMALL.name, 0.6, 9.0), row_of(OURS, SMALL.name, 0.1, 0.4)])[4] == (1.0, True)
    # A plan that does not fit on the judge's terms has no rate there.
    assert values([other, row_of(asked, SMALL.name, 0.6, 0.4, "no")])[0] == (0.0, False)
    # A search that found nothing was not quick.
    assert values([other, row_of(asked, SMALL.name, 0.0, 0.0, "")])[1] == (math.inf, False)
    assert values([row_of(OURS, WIDE_FLEETS[0].name, 0.0, 0.4, "")]) == [(2.5, True)]


def test_a_thousand_devices_in_sixteen_regions(tmp_path: Path) -> None:
    scenario = wide_scenario(WIDE_FLEETS[0], write_fleet_files(tmp_path))
    cluster = scenario.cluster
    assert (len(cluster.devices), len(cluster.regions)) == (1024, 16)
    between = [link for link in cluster.links if link.source in cluster.regions and link.source != link.target]
    assert len(between) == 16 * 15
    assert all(0.1e9 <= link.bandwidth_bps <= 1e9 and 0.010 <= link.latency_s <= 0.100 for link in between)
    back = {(link.target, link.source): (link.bandwidth_bps, link.latency_s) for link in between}
    assert all(back[link.source, link.target] == (link.bandwidth_bps, link.latency_s) for link in between)


def test_a_process_is_replaced_when_it_takes_too_long() -> None:
    """By its processor time: the other work of the machine does not count."""
    with LimitedProcess(sum) as process:
        assert process.result(range(9), 60.0) == 36
        with pytest.raises(TimeoutError, match=r"^it takes longer than 0.01 s$"):
            process.result(range(10**15), 0.01)
        assert process.result(range(9), 60.0) == 36


def test_a_process_that_ends_is_told_from_a_slow_one() -> None:
    with LimitedProcess(os._exit) as process, pytest.raises(ChildProcessError, match="its process ended"):
        process.result(1, 60.0)
