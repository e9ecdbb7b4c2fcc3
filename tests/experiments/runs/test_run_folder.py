"""A run's folder holds what carried its bytes, and is read without where it was written before this was noted."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.report.figures.run_figure import draw_runs
from experiments.report.perfetto import trace_events
from experiments.runs.folder import new_folder, read_record, summarise, write_record
from planner.runs.record import RealNetwork, RunRecord
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from tests.helpers.strategies.scripted_policy import Scripted
from traces.common.errors import InputError, RunError

NETWORKS = {
    "simulated": None,
    "relay": RealNetwork("relay", {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}),
    "shaper": RealNetwork("shaper", {}),
}


def record_over(network: RealNetwork | None) -> RunRecord:
    scenario = chain_scenario([1e-3] * 2, [1e-3] * 2)
    simulated = Simulator().run(scenario, chain_plan(scenario), None, 1)
    return RunRecord("paced", scenario, simulated.plan, simulated.events, (), network=network)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_carried_the_bytes(name: str, tmp_path: Path) -> None:
    network = NETWORKS[name]
    write_record(record_over(network), tmp_path)
    assert read_record(tmp_path).network == network
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = (None, None) if network is None else (network.emulator, network.tcp)
    assert (summary["emulator"], summary["tcp"]) == expected


def test_a_folder_of_before(tmp_path: Path) -> None:
    write_record(record_over(NETWORKS["relay"]), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    del summary["emulator"], summary["tcp"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    record = read_record(tmp_path)
    assert record.network is None
    assert summarise(record)["emulator"] is None


def test_a_run_in_which_layers_change_devices_is_read_as_it_was_written_and_can_be_drawn(tmp_path: Path) -> None:
    scenario = chain_scenario([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    plan = chain_plan(scenario)
    (pipeline,) = plan.pipelines
    replicas = [stage.replicas for stage in pipeline.stages]
    turned = (replace(stage, replicas=held) for stage, held in zip(pipeline.stages, replicas[::-1], strict=True))
    other = replace(plan, pipelines=(replace(pipeline, stages=tuple(turned)),))
    record = Simulator().run(scenario, plan, Scripted({0: other}), 5)
    write_record(record, tmp_path / "run")
    (line,) = (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()
    assert json.loads(line)["moved_bytes"] == record.decisions[0].migration.size_bytes == 8000
    read = read_record(tmp_path / "run")
    assert read.decisions == record.decisions
    assert list(read.events) == list(record.events)
    assert "send layers" in {each["name"] for each in trace_events([read])["traceEvents"]}
    draw_runs([read], tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 0


def test_a_run_is_kept_where_somebody_else_has_taken_its_name(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "run") as folder:
            (folder / "mine").write_text("mine")
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "theirs").write_text("theirs")

    with pytest.raises(RunError, match="everything is in") as found:
        fill()
    (kept,) = (path for path in tmp_path.iterdir() if path.name != "run")
    assert str(kept) in str(found.value)
    assert (kept / "mine").read_text() == "mine"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["theirs"]


def test_a_folder_in_a_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in ("file/run", "file/deep/run"):
        with (
            pytest.raises(InputError, match=r"no folder can be made here: .* is not a folder"),
            new_folder(tmp_path / target),
        ):
            pytest.fail("the block was entered")


def test_what_a_killed_run_has_left_goes_and_what_a_living_run_writes_stays(tmp_path: Path) -> None:
    target = tmp_path / "run"
    left = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, signal, sys; from pathlib import Path; from experiments.runs.folder import new_folder\n"
            f"with new_folder(Path({str(target)!r})) as folder:\n"
            "    (folder / 'half').write_text('')\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n",
        ]
    )
    left.wait()
    (abandoned,) = tmp_path.iterdir()
    with new_folder(target) as living:
        assert not abandoned.exists()
        # A second run is refused when it starts, not when all is trained.
        with pytest.raises(InputError, match="this folder is being written now"), new_folder(target):
            pytest.fail("the block was entered")
        (living / "mine").write_text("")
    assert [path.name for path in target.iterdir()] == ["mine"]
    assert list(tmp_path.iterdir()) == [target]


def test_runs_into_folders_of_one_name_go_beside_each_other(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "run"), new_folder(tmp_path / "b" / "run"):
        pass
    assert (tmp_path / "a" / "run").is_dir()
    assert (tmp_path / "b" / "run").is_dir()
