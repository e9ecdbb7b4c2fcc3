"""What the executor bench holds us against: torch.distributed.pipelining, on equal terms."""

import sys
from pathlib import Path

import pytest

from experiments.benches.execution import executor
from tests.helpers.processes.process_watch import processes_of, started_process, wait_until

LONG = """
from experiments.benches.execution.executor import run_torch_pipelining
from experiments.benches.execution.torch_pipelining import PipeliningRun
from experiments.benches.cases import two_stage_plan, two_stage_scenario

scenario = two_stage_scenario(0.02, 1000, 4, 1e9, 0.0)
plan = two_stage_plan(scenario, "1f1b", (1,) * 4, (2, 1), "scheduled")
run = PipeliningRun(schedule="1f1b", compute="paced", steps=10_000, microbatches=4, activation_bytes=1000)
run_torch_pipelining(run, scenario, plan, "none", "as-is")
"""


def be_quiet(_: str) -> None:
    pass


def test_both_sides_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "REAL_MODEL", {"vocabulary": 32, "width": 16, "heads": 2, "blocks": 2, "length": 8})
    monkeypatch.setattr(executor, "REAL_STEPS", 4)
    (pair,) = executor._real_pairs(1, be_quiet)
    assert pair.loss_difference < executor.MOST_LOSS_DIFFERENCE
    assert min(pair.own_cpu_s, pair.torch_cpu_s) > 0


def test_other_training_shows_in_the_losses() -> None:
    assert executor._largest_difference([2.0, 1.0], [2.0, 1.0]) == 0
    assert executor._largest_difference([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.05)


def test_processor_time_has_columns_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {**{way: [0.5] for way in executor.OURS}, **{f"torch {name}": [2.0] for name in executor.TORCH}}
    monkeypatch.setattr(executor, "choose_emulator", lambda choice, tell: choice)
    monkeypatch.setattr(executor, "_paced_rounds", lambda *_: ways)
    pair = executor.RealPair(own_cpu_s=0.4, torch_cpu_s=0.5, loss_difference=1.0)
    monkeypatch.setattr(executor, "_real_pairs", lambda *_: [pair])
    result = executor.measure_executor(True, be_quiet)
    for row in result.rows:
        filled = {head for head, value in row.items() if value != ""} - {"what", "way"}
        paced = {"latency_s", "step_s", "of_floor", "torch_1f1b_over_this"}
        assert filled == ({"cpu_s_per_step", "torch_cpu_over_this"} if "real" in str(row["what"]) else paced)
    own, theirs = result.rows[-2:]
    assert (own["cpu_s_per_step"], own["torch_cpu_over_this"]) == (0.4, 1.25)
    assert (theirs["cpu_s_per_step"], theirs["torch_cpu_over_this"]) == (0.5, 1.0)
    assert [check.name for check in result.checks if not check.holds] == ["largest difference of a loss from torch's"]
    assert result.text()


@pytest.mark.slow
def test_ranks_of_torch_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with started_process([sys.executable, "-c", LONG], tmp_path) as (process, mark):
        wait_until(lambda: len(processes_of("executor.rank.worker", mark)) == 2, "the ranks start")
        process.kill()
