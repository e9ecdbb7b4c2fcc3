"""A comparison in both backends: what is said of it, and what it is scaled to."""

import pytest

from experiments.benches.result import Row
from experiments.reproductions.executed.execution import Comparison, execute, executed_checks, wan_ratios
from tests.helpers.processes.command import ropebridge
from tests.helpers.scenarios.builders import chain_plan, chain_scenario


@pytest.mark.slow
def test_a_row_for_each_rival() -> None:
    scenario = chain_scenario([0.02] * 2, [0.04] * 2, output_bytes=[400_000] * 2, bandwidth_bps=50e6)
    deep, flat = (chain_plan(scenario, depths=depths) for depths in ((4, 1), (1, 1)))
    told: list[str] = []
    comparison = Comparison("a chain", scenario, {"deep": (deep, "none"), "flat": (flat, "none")}, 4, step_s=0.4)
    (row,) = execute(comparison, told.append)
    assert (row["system"], row["rival"]) == ("deep", "flat")
    assert float(row["simulated_ratio"]) > 1
    assert float(row["executed_ratio"]) > 1
    off = float(row["executed_ratio"]) / float(row["simulated_ratio"]) - 1
    assert float(row["points"]) == pytest.approx(100 * off)
    throughput, sent = executed_checks([row, {**row, "points": -12.0}])
    assert throughput.value == max(12.0, abs(100 * off))
    # Both plans send the same, and the real run sends what the simulator says.
    assert row["simulated_wan_ratio"] == 1
    assert sent.value < 1
    assert "times fewer bytes" in str(row["setting"])
    assert told[:1] == ["a chain: deep"]


def test_a_system_that_there_is_not() -> None:
    done = ropebridge("reproduce", "megatron", "--execute")
    assert (done.returncode, done.stdout) == (2, "")
    assert "valid" in done.stderr or "asteroid" in done.stderr


def test_bytes_between_regions_are_compared_where_there_are_any() -> None:
    rows: list[Row] = [
        {"points": 1.0, **wan_ratios((80, 88), (10, 10))},
        {"points": 2.0, **wan_ratios((0, 0), (10, 9))},
    ]
    throughput, sent = executed_checks(rows)
    assert throughput.value == 2
    assert sent.value == pytest.approx(10)
