"""`ropebridge backtest`: its figures against plain simulations, and the command as people call it."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from experiments.report.data.sweep_points import SweptTable
from experiments.report.html.backtest_page import backtest_page
from experiments.runs.scenario import choose_scenario
from experiments.sweep.backtest.comparison import METRICS, compared_runs
from experiments.sweep.backtest.definition import BacktestConfig, backtest_study
from experiments.sweep.backtest.task import window_metrics
from experiments.sweep.outcomes import read_outcomes
from experiments.sweep.table import Value
from planner.events.event import EventKind
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.process_watch import started, wait_until
from tests.helpers.strategies.scripted_policy import Scripted
from traces.trace import LinkTrace

SCENARIO = choose_scenario("two-regions")
FAST_MBPS, SLOW_MBPS, HALF_S = 120.0, 6.0, 60.0


def halves(first_mbps: float, second_mbps: float) -> str:
    return f"time_s,bandwidth_mbps\n0,{first_mbps}\n{HALF_S},{second_mbps}\n{2 * HALF_S},\n"


HALVES = halves(FAST_MBPS, SLOW_MBPS)

# A strategy in a file: everything on one device, whose throughput does not depend on the link.
ALONE = """
from planner.plan.plan import Pipeline, Plan, Replica, Stage

def plan(scenario):
    stage = Stage(0, len(scenario.model.layers), (Replica("east-gpu"),), 1)
    return Plan(scenario.name, scenario.model.name, "alone", "1f1b", (Pipeline((stage,), (8,) * 8),))
"""


def alone() -> Plan:
    stage = Stage(0, len(SCENARIO.model.layers), (Replica("east-gpu"),), 1)
    return Plan(SCENARIO.name, SCENARIO.model.name, "alone", "1f1b", (Pipeline((stage,), (8,) * 8),))


def with_trace(trace: LinkTrace) -> Scenario:
    links = tuple(replace(link, trace=trace, bandwidth_bps=trace.mean_bps) for link in SCENARIO.cluster.links)
    return replace(SCENARIO, cluster=Cluster(SCENARIO.cluster.devices, links))


def constant(rate_mbps: float) -> Scenario:
    return with_trace(LinkTrace(np.zeros(1), np.array([1e6 * rate_mbps]), 1.0))


def write(folder: Path, **files: str) -> Path:
    (folder / "traces").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / "traces" / f"{name}.csv").write_text(text)
    return folder / "traces"


def measured(config: BacktestConfig, folder: Path) -> dict[tuple[float, str], dict[str, Value]]:
    """The metrics of all points, carried out in this process, by start and policy."""
    study = backtest_study(config)
    task = study.make_task(folder)
    return {(point.values["start_s"], point.values["policy"]): task.measure(point.values) for point in study.points}


def test_the_bounds_of_two_constant_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline is best in the fast half, one device alone in the slow one: by simulations at constant rates."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alone.py").write_text(ALONE)
    fast_mbps = 1000.0
    traces = write(tmp_path, halves=halves(fast_mbps, SLOW_MBPS))
    plans = {"none": make_plan("gpipe", SCENARIO), "static:alone.py": alone()}
    rates = {
        name: [
            window_metrics(Simulator(HALF_S).run(constant(rate), plan, None, 10**9), HALF_S)["samples_per_s"]
            for rate in (fast_mbps, SLOW_MBPS)
        ]
        for name, plan in plans.items()
    }
    fast, slow = (np.array([rates[name][half] for name in plans], np.float64) for half in (0, 1))
    assert fast[0] > 1.2 * fast[1]
    assert slow[1] > 1.2 * slow[0]
    config = BacktestConfig(
        scenario="two-regions",
        traces=traces,
        policies=(),
        rivals=("alone.py",),
        window_s=2 * HALF_S,
        strategy="gpipe",
    )
    runs = {name: metrics for (_, name), metrics in measured(config, tmp_path).items()}
    found = compared_runs(runs)
    # Of one step at the change, half of a short step, it is unknown in which half it falls.
    near = {"rel": 0.03}
    for place, name in enumerate(plans):
        assert runs[name]["samples_per_s"] == pytest.approx((fast[place] + slow[place]) / 2, **near)
    means = (fast + slow) / 2
    assert found["none"]["best_static_per_s"] == pytest.approx(means.max(), **near)
    assert found["none"]["best_static"] == list(plans)[int(means.argmax())]
    assert found["none"]["known_ahead_per_s"] == pytest.approx((fast.max() + slow.max()) / 2, **near)
    assert found["static:alone.py"]["gain"] == pytest.approx(means[1] / means[0], **near)


def test_a_run_is_the_plain_simulation_of_its_window(tmp_path: Path) -> None:
    """The window begins inside the fast half, after which the trace begins anew."""
    config = BacktestConfig(
        scenario="two-regions",
        traces=write(tmp_path, halves=HALVES),
        policies=("depth",),
        rivals=(),
        window_s=30.0,
        every_s=45.0,
        strategy="megatron",
    )
    found = measured(config, tmp_path)
    assert {start_s for start_s, _ in found} == {0.0, 45.0, 90.0}
    later = LinkTrace(np.array([0.0, 15.0, 75.0]), 1e6 * np.array([FAST_MBPS, SLOW_MBPS, FAST_MBPS]), 120.0)
    # What is known at 45 s is the rate of the fast half.
    plan = make_plan("megatron", constant(FAST_MBPS))
    frame = Simulator(30.0).run(with_trace(later), plan, None, 10**9).metrics
    done = np.interp(30.0, [0.0, *frame.end_s], plan.global_batch * np.arange(len(frame) + 1))
    metrics = found[45.0, "none"]
    assert metrics["samples_per_s"] == pytest.approx(float(done) / 30)
    assert (metrics["steps_done"], metrics["changes"], metrics["lost_s"]) == (len(frame), 0, 0.0)
    assert int(found[45.0, "depth"]["changes"]) > 0


def test_a_policy_is_shown_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blind.py").write_text(
        "class policy:\n"
        "    def __init__(self, scenario):\n"
        "        assert all(link.trace is None for link in scenario.cluster.links)\n"
        "    def decide(self, observation, plan):\n"
        "        return None\n"
    )
    config = BacktestConfig(
        scenario="two-regions",
        traces=write(tmp_path, halves=HALVES),
        policies=("blind.py",),
        rivals=(),
        window_s=30.0,
        every_s=80.0,
        strategy="megatron",
    )
    found = measured(config, tmp_path)
    # Runs with a policy probe their paths, with few bytes.
    one, other = ({**found[80.0, name], "wan_bytes": 0} for name in ("blind.py", "none"))
    assert one == other


def test_a_move_costs_the_time_until_the_last_layer_is_there() -> None:
    scenario = constant(FAST_MBPS)
    policy = Scripted({2: alone()})
    record = Simulator(60.0).run(scenario, make_plan("megatron", scenario), policy, 10**9)
    moves = [event for event in record.events if event.kind == EventKind.MIGRATE]
    metrics = window_metrics(record, 60.0)
    ends_s = record.metrics.end_s
    assert moves
    (decision,) = record.decisions
    expected_s = max(event.arrived_s for event in moves) - ends_s[decision.first_step - 1]
    assert metrics["lost_s"] == pytest.approx(expected_s)
    assert (metrics["changes"], metrics["moves"]) == (1, 1)
    assert metrics["moved_bytes"] == sum(event.size_bytes for event in moves)


def test_the_page_has_a_row_for_each_policy_and_window() -> None:
    shared = {"trace": "a.csv", "status": "ok", "error": None, "changes": 3, "lost_s": 2.0, "none_per_s": 10.0}
    shared |= {"best_static_per_s": 11.0, "best_static": "static:auto", "known_ahead_per_s": 14.0}
    regrets = {"regret_static": 0.0, "regret_known_ahead": 0.2}
    made = [
        {**shared, **regrets, "point": 4 * number + place, "start_s": 600.0 * number, "policy": policy, "gain": gain}
        for number in range(2)
        for place, (policy, gain) in enumerate((("none", 1.0), ("auto", 1.25 - number / 2), ("static:auto", 1.1)))
    ]
    failed = {"point": 3, "trace": "a.csv", "start_s": 0.0, "policy": "static:ddp", "status": "failed", "error": "<no>"}
    page = backtest_page(SweptTable("my-backtest", "backtest", [*made[:3], failed, *made[3:]], ("window_s 600",)))
    for text in (
        "2 windows",
        "No policy gains anything",
        "<td>auto</td><td>2</td><td>0.968</td><td>0.750</td><td>a.csv at 600 s</td>",
        "<td>known ahead</td><td>2</td><td>1.400</td>",
        "<td>1.250 (3 changes, 2 s)</td>",
        "1 of 7 runs",
        "&lt;no&gt;",
    ):
        assert text in page


SHORT = "time_s,bandwidth_mbps\n0,100\n5,\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--traces", "nowhere"], ["--traces nowhere", "no such folder"]),
        (["--traces", "empty"], ["--traces empty", "holds no file"]),
        (["--traces", "notes"], ["notes/notes.txt"]),
        (["--traces", "traces", "--policies", "none,dept"], ["unknown policy 'dept'", "did you mean 'depth'"]),
        (["--traces", "traces", "--policies", "mine.py"], ["no file 'mine.py'"]),
        (["--traces", "traces", "--rivals", "megatrn"], ["unknown strategy 'megatrn'", "did you mean 'megatron'"]),
        (["--traces", "traces", "--strategy", "megatrn"], ["unknown strategy 'megatrn'"]),
        (["--traces", "traces"], ["traces/short.csv", "lasts 5 s, shorter than a window of 600 s", "--window"]),
        (["--traces", "traces", "--window", "0 s"], ["--window", "0 s is not allowed"]),
        (["--traces", "traces", "--window", "5 s", "--every", "0 s"], ["--every", "0 s is not allowed"]),
        (["--traces", "traces", "--window", "5 s", "--every", "1 us"], []),
        (["--traces", "traces", "--link", "west-est"], ["unknown link 'west-est'", "did you mean"]),
        (["--traces", "traces", "--plan", "p.json", "--strategy", "ddp"], ["--plan", "--strategy"]),
        (["--traces", "traces", "--window", "5 s", "--engine", "slum"], ["unknown engine 'slum'"]),
        (["--traces", "traces", "--window", "5 s", "--slurm", "partition"], ["--slurm", "KEY=VALUE"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: list[str], words: list[str], tmp_path: Path) -> None:
    write(tmp_path, short=SHORT if "1 us" not in options else "time_s,bandwidth_mbps\n0,100\n50,\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("no trace\n")
    done = ropebridge("backtest", "two-regions", *options, "-o", tmp_path / "out", cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert all(word in done.stderr for word in (words or ["points", "--every"]))
    assert not (tmp_path / "out").exists()


def rows(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "points.parquet").drop_columns(["wall_s"]).to_pylist()


OPTIONS = ("--strategy", "megatron", "--rivals", "gpipe,pipedream", "--window", "1 min", "--every", "30 s")


def summary_of(folder: Path, *options: object) -> dict[str, Any]:
    arguments = ("backtest", "two-regions", "--traces", folder / "traces", *OPTIONS, "-o", folder / "out", "--json")
    done = ropebridge(*arguments, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_backtest_goes_on_and_is_reported(tmp_path: Path) -> None:
    write(tmp_path, a=HALVES, b=halves(60, 20))
    summary = summary_of(tmp_path, "--policies", "depth")
    windows = 6
    assert (summary["points"], summary["carried_out"], summary["failed"]) == (4 * windows, 4 * windows, 0)
    none, depth, static, ahead = summary["policies"]
    assert (none["policy"], none["gain"], none["windows"]) == ("none", 1.0, windows)
    assert depth["gain"] <= ahead["gain"]
    assert 1 <= static["gain"] <= ahead["gain"]
    before = rows(tmp_path / "out")
    assert {row["trace"] for row in before} == {"a.csv", "b.csv"}
    for row in before:
        assert set(METRICS) <= set(row)
        assert row["regret_known_ahead"] >= 0
        assert row["samples_per_s"] == pytest.approx(row["gain"] * row["none_per_s"])
    # The same again does nothing, one more policy only its own runs, and another window is another backtest.
    assert summary_of(tmp_path, "--policies", "depth")["carried_out"] == 0
    assert summary_of(tmp_path, "--policies", "depth,deepcee")["carried_out"] == windows
    assert summary_of(tmp_path, "--policies", "depth")["carried_out"] == 0
    assert rows(tmp_path / "out") == before
    arguments = ("backtest", "two-regions", "--traces", tmp_path / "traces", *OPTIONS, "-o", tmp_path / "out")
    other = ropebridge(*arguments, "--window", "2 min", cwd=tmp_path)
    assert other.returncode == 2
    assert "it has other settings" in other.stderr
    # The text has a line for each policy and bound; the page shows the same figures.
    text = ropebridge(*arguments, "--policies", "depth", cwd=tmp_path).stdout
    assert [line.split("  ")[0] for line in text.splitlines()[:5]] == [
        "policy",
        "none",
        "depth",
        "best static plan",
        "known ahead",
    ]
    assert ropebridge("report", tmp_path / "out", "-o", tmp_path / "page.html", "-o", tmp_path / "map.png").stderr == ""
    page = (tmp_path / "page.html").read_text()
    assert f"{depth['gain']:.3f} times the throughput" in page
    assert "Gain in each window" in page
    assert (tmp_path / "map.png").stat().st_size > 20_000


@pytest.mark.slow
def test_killed_in_the_middle_and_resumed(tmp_path: Path) -> None:
    write(tmp_path, a=HALVES, b=halves(60, 20))
    often = ("--policies", "depth", "--every", "10 s")
    arguments = ["backtest", "two-regions", "--traces", str(tmp_path / "traces"), *OPTIONS, *often]
    logs = tmp_path / "out" / "log"

    def finished() -> int:
        return sum(log.read_bytes().count(b"\n") for log in logs.glob("*.jsonl"))

    with started([*arguments, "-o", str(tmp_path / "out"), "-j", "2"], tmp_path) as (process, _):
        wait_until(lambda: finished() >= 5, "no points come")
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    before = len(read_outcomes(logs))
    points = 4 * 2 * 7
    assert 5 <= before < points
    assert summary_of(tmp_path, *often)["carried_out"] == points - before
    (tmp_path / "again").mkdir()
    write(tmp_path / "again", a=HALVES, b=halves(60, 20))
    assert summary_of(tmp_path / "again", *often, "-j", 1)["carried_out"] == points
    assert rows(tmp_path / "again" / "out") == rows(tmp_path / "out")
