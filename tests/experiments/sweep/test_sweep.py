"""`ropebridge sweep` as people call it: one table, whatever happens on the way to it."""

import contextlib
import json
import os
import pty
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.benches.processes import marked_processes
from experiments.scenarios import READY_FOLDER
from experiments.sweep.folder import check_folder, read_sweep_json, write_sweep_json
from experiments.sweep.outcomes import read_outcomes
from experiments.sweep.sweep_file import read_sweep
from experiments.sweep.table import RUN_METRICS
from tests.helpers.processes.command import COMMAND, ropebridge
from tests.helpers.processes.process_watch import started, wait_until
from traces.common.errors import InputError

SWEEP = """
scenario: two-regions
steps: 4
parameters:
  training.global_batch: {grid: [32, 64, lots]}
  strategy: {list: [megatron, gpipe, megatrn]}
  plan.connections: {list: [1, 2, 2]}
  cluster.links[west-east].latency: {uniform: [5 ms, 50 ms]}
draws: 4
"""


def write(folder: Path, text: str = SWEEP) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


def rows(folder: Path) -> list[dict[str, Any]]:
    """The table without the one column that says how long things took."""
    return pq.read_table(folder / "points.parquet").drop_columns(["wall_s"]).to_pylist()


def carried_out(*arguments: object) -> dict[str, Any]:
    done = ropebridge("sweep", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    summary = carried_out(write(folder), "-o", folder / "out", "-j", 2)
    assert (summary["points"], summary["carried_out"], summary["failed"]) == (36, 36, 20)
    assert summary["points_per_s"] > 0
    return folder


def test_a_row_holds_what_the_simulator_says_of_the_same_run(undisturbed: Path, tmp_path: Path) -> None:
    row = rows(undisturbed / "out")[16 + 5]
    assert (row["point"], row["status"]) == (21, "failed")
    row = rows(undisturbed / "out")[12 + 5]
    assert (row["training.global_batch"], row["strategy"], row["plan.connections"]) == ("64", "gpipe", 2)
    scenario = READY_FOLDER / "two-regions.yaml"
    text = scenario.read_text().replace("25 ms", row["cluster.links[west-east].latency"])
    text = text.replace("global_batch: 64", f"global_batch: {row['training.global_batch']}")
    (tmp_path / "same.yaml").write_text(text.replace("gpt-small.yaml", str(scenario.with_name("gpt-small.yaml"))))
    plan = tmp_path / "plan.json"
    assert ropebridge("plan", tmp_path / "same.yaml", "--strategy", "gpipe", "-o", plan).returncode == 0
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"connections": 2}))
    done = ropebridge("simulate", tmp_path / "same.yaml", "--plan", plan, "--steps", 4, "--json")
    expected = json.loads(done.stdout)
    for metric in ("step_s", "samples_per_s", "bubble_ratio", "wan_bytes", "cost_usd", "staleness", "decisions"):
        assert row[metric] == expected[metric]
    assert row["steps_done"] == expected["steps"] == 4
    assert row["peak_memory_bytes"] == max(expected["peak_memory_bytes"].values())
    for device, share in expected["utilisation"].items():
        assert row[f"utilisation[{device}]"] == share


def test_the_table_is_tidy_and_typed(undisturbed: Path) -> None:
    table = pq.read_table(undisturbed / "out" / "points.parquet")
    assert table.column("point").to_pylist() == list(range(36))
    names = read_sweep_json(undisturbed / "out")
    assert [parameter["column"] for parameter in names["parameters"]] == [
        "training.global_batch",
        "strategy",
        "plan.connections",
        "cluster.links[west-east].latency_s",
    ]
    assert names["metrics"][: len(RUN_METRICS)] == list(RUN_METRICS)
    assert set(names["metrics"]) < set(table.column_names)
    types = {name: table.schema.field(name).type for name in table.column_names}
    assert types["plan.connections"] == types["wan_bytes"] == pa.int64()
    assert types["samples_per_s"] == types["cluster.links[west-east].latency_s"] == types["wall_s"] == pa.float64()
    for row in table.to_pylist():
        written = float(row["cluster.links[west-east].latency"].removesuffix(" ms"))
        assert row["cluster.links[west-east].latency_s"] == pytest.approx(written / 1000)
        failed = row["status"] == "failed"
        assert (row["error"] is not None) == failed
        assert all((row[metric] is None) == failed for metric in RUN_METRICS)


def test_points_that_fail_say_why_and_stop_nobody(undisturbed: Path) -> None:
    for row in rows(undisturbed / "out"):
        if row["training.global_batch"] == '"lots"':
            assert "two-regions.yaml:18: training.global_batch: 'lots' is not valid" in row["error"]
        elif row["strategy"] == "megatrn":
            assert "unknown strategy 'megatrn'; did you mean 'megatron'" in row["error"]
        else:
            assert row["status"] == "ok"


def test_carrying_it_out_again_does_nothing_and_more_values_are_added(undisturbed: Path, tmp_path: Path) -> None:
    before = rows(undisturbed / "out")
    path, out = write(tmp_path, SWEEP.replace("draws: 4", "draws: 2")), tmp_path / "out"
    assert carried_out(path, "-o", out)["carried_out"] == 18
    assert carried_out(path, "-o", out, "--retry-failed")["carried_out"] == 10
    write(tmp_path)
    assert carried_out(path, "-o", out)["carried_out"] == 18
    assert rows(out) == before
    # Fewer again: the table is that of the file as it is now.
    write(tmp_path, SWEEP.replace("32, 64, lots", "64"))
    assert carried_out(path, "-o", out)["carried_out"] == 0
    kept = [row for row in before if row["training.global_batch"] == "64"]
    assert [row["samples_per_s"] for row in rows(out)] == [row["samples_per_s"] for row in kept]


def lines_in(logs: Path) -> int:
    return sum(log.read_bytes().count(b"\n") for log in logs.glob("*.jsonl"))


LONG = SWEEP.replace("draws: 4", "draws: 15").replace("steps: 4", "steps: 20")


# One worker runs these tests, so that the undisturbed sweep is carried out once.
compared_to_a_long_sweep = pytest.mark.xdist_group("long sweep")


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("long")
    carried_out(write(folder, LONG), "-o", folder / "out", "-j", 2)
    return rows(folder / "out")


def end_in_the_middle(tmp_path: Path, end: Callable[[int, str], None]) -> tuple[int, str]:
    """Start a long sweep, let something happen to it, and return its status and what it said."""
    write(tmp_path, LONG)
    logs = tmp_path / "out" / "log"
    before = lines_in(logs)
    arguments = ["sweep", str(tmp_path / "sweep.yaml"), "-o", str(tmp_path / "out"), "-j", "2"]
    with started(arguments, tmp_path) as (process, mark):
        wait_until(lambda: lines_in(logs) >= before + 25, "no points come")
        end(process.pid, mark)
        _, stderr = process.communicate(timeout=60)
    # The block ends only when no process is left, workers included.
    return process.returncode, stderr


@compared_to_a_long_sweep
def test_killed_in_the_middle_and_resumed(undisturbed_long: list[dict[str, Any]], tmp_path: Path) -> None:
    status, _ = end_in_the_middle(tmp_path, lambda pid, _: os.kill(pid, signal.SIGKILL))
    assert status == -signal.SIGKILL
    assert not (tmp_path / "out" / "points.parquet").exists()
    before = len(read_outcomes(tmp_path / "out" / "log"))
    assert 25 <= before < 135
    summary = carried_out(tmp_path / "sweep.yaml", "-o", tmp_path / "out", "-j", 2)
    assert summary["carried_out"] == 135 - before
    assert rows(tmp_path / "out") == undisturbed_long


def interrupt_all(pid: int, mark: str) -> None:
    """What Ctrl-C in a terminal does: every process of the command gets it."""
    for process in marked_processes(mark):
        os.kill(process, signal.SIGINT)


def terminate(pid: int, mark: str) -> None:
    os.kill(pid, signal.SIGTERM)


@compared_to_a_long_sweep
@pytest.mark.parametrize("end", [interrupt_all, pytest.param(terminate, marks=pytest.mark.slow)])
def test_an_interrupted_sweep_keeps_a_table(
    end: Callable[[int, str], None], undisturbed_long: list[dict[str, Any]], tmp_path: Path
) -> None:
    status, stderr = end_in_the_middle(tmp_path, end)
    assert status == 130
    # A busy machine is slow enough for lines of progress.
    assert [line for line in stderr.splitlines() if " points/s, " not in line] == [
        "135 points",
        f"finished points are kept in {tmp_path / 'out'}; the same command carries out the rest",
        "ropebridge: interrupted",
    ]
    table = rows(tmp_path / "out")
    assert 25 <= len(table) < 135
    assert table == [row for row in undisturbed_long if row["point"] in {each["point"] for each in table}]


@compared_to_a_long_sweep
def test_a_full_disk_ends_it_and_what_was_written_counts(
    undisturbed_long: list[dict[str, Any]], tmp_path: Path
) -> None:
    path, out = write(tmp_path, LONG), tmp_path / "out"
    most_bytes = 15_000
    done = subprocess.run(
        [*COMMAND, "sweep", str(path), "-o", str(out), "-j", "2"],
        capture_output=True,
        text=True,
        check=False,
        # Python would cut the compiled modules that it writes at this limit, and every later process would read them.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
    )
    assert done.returncode == 1
    # A busy machine also gets lines of progress.
    said = [line for line in done.stderr.splitlines() if " of 135 points, " not in line]
    assert said[0] == "135 points"
    assert "cannot be written" in said[1]
    assert len(said) == 2
    before = len(read_outcomes(out / "log"))
    assert 12 < before < 135
    assert carried_out(path, "-o", out, "-j", 2)["carried_out"] == 135 - before
    assert rows(out) == undisturbed_long


@pytest.mark.slow
def test_in_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    path = write(
        tmp_path, "strategy: megatron\nparameters:\n  scenario: {grid: [two-regions]}\n  steps: {grid: [2, 3, 4]}\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*COMMAND, "sweep", str(path), "-o", str(tmp_path / "out"), "--json"], stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):
        # Reading fails when nobody holds the other end any more.
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait() == 0
    assert "3/3" in shown.decode()


def workers(mark: str) -> list[int]:
    """Processes of the pool: children of the server that forks them."""
    servers = {pid for pid, command in marked_processes(mark).items() if "multiprocessing.forkserver" in command}
    parents = {}
    for pid in servers:
        try:
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return [pid for pid, parent in parents.items() if parent in servers]


def cpu_s(pid: int) -> float:
    """What a process has computed so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kill_workers(mark: str) -> list[int]:
    killed = workers(mark)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    return killed


@compared_to_a_long_sweep
def test_workers_that_die_cost_no_other_point(undisturbed_long: list[dict[str, Any]], tmp_path: Path) -> None:
    write(tmp_path, LONG)
    arguments = ["sweep", str(tmp_path / "sweep.yaml"), "-o", str(tmp_path / "out"), "-j", "2"]
    with started(arguments, tmp_path) as (process, mark):
        wait_until(lambda: lines_in(tmp_path / "out" / "log") >= 25, "no points come")
        os.kill(workers(mark)[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert rows(tmp_path / "out") == undisturbed_long


@pytest.mark.slow
def test_a_point_that_is_the_death_of_its_workers_has_failed(tmp_path: Path) -> None:
    text = "scenario: two-regions\nstrategy: megatron\nparameters:\n  steps: {grid: [3, 60000, 4, 5]}\n"
    path = write(tmp_path, text)
    logs = tmp_path / "out" / "log"
    with started(["sweep", str(path), "-o", str(tmp_path / "out"), "-j", "2"], tmp_path) as (process, mark):
        wait_until(lambda: lines_in(logs) == 3, "the short points are not done")
        first = kill_workers(mark)
        wait_until(lambda: any(cpu_s(pid) > 2 for pid in set(workers(mark)) - set(first)), "nobody tries again")
        kill_workers(mark)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    table = rows(tmp_path / "out")
    assert [row["status"] for row in table] == ["ok", "failed", "ok", "ok"]
    assert "died, twice" in table[1]["error"]


def refused(arguments: list[object], folder: Path, *expected: str) -> None:
    """Exit 2, one line on stderr with all that is expected in it, and everything as it was."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = ropebridge("sweep", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    for text in expected:
        assert text in line
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_wrong_input_leaves_nothing_behind(tmp_path: Path) -> None:
    def given(old: str, new: str) -> None:
        write(tmp_path, SWEEP.replace(old, new))

    given("global_batch", "global_bach")
    refused(["sweep.yaml"], tmp_path, "sweep.yaml:5: parameters.training.global_bach", "did you mean 'global_batch'")
    given("[32, 64, lots]", "[]")
    refused(["sweep.yaml"], tmp_path, "training.global_batch", "the grid is empty")
    given("", "")
    refused(["sweep.yaml", "--engine", "dusk"], tmp_path, "unknown engine 'dusk'", "did you mean 'dask'")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("mine")
    refused(["sweep.yaml", "-o", "mine"], tmp_path, "mine: this folder holds other files")


def test_null_removes_a_key_of_the_scenario(tmp_path: Path) -> None:
    plain = (READY_FOLDER / "two-regions.yaml").read_text()
    plain = plain.replace("gpt-small.yaml", str(READY_FOLDER / "gpt-small.yaml"))
    faults = "[{device: west-gpu, hangs: 1 s, goes_on: 9 s}]"
    (tmp_path / "faulty.yaml").write_text(f"{plain}\nfaults: {faults}\n")
    parameters = f"faults: {{list: [null, {faults}]}}"
    text = f"scenario: faulty.yaml\nstrategy: megatron\nsteps: 3\nparameters:\n  {parameters}\n"
    assert carried_out(write(tmp_path, text), "-o", tmp_path / "out", "-j", 1)["failed"] == 0
    without, other = rows(tmp_path / "out")
    done = ropebridge("simulate", "two-regions", "--strategy", "megatron", "--steps", 3, "--json")
    assert without["samples_per_s"] == json.loads(done.stdout)["samples_per_s"] > other["samples_per_s"]


def test_a_folder_belongs_to_one_sweep(undisturbed: Path, tmp_path: Path) -> None:
    out = undisturbed / "out"
    write(tmp_path, SWEEP.replace("plan.connections", "training.microbatch"))
    refused([tmp_path / "sweep.yaml", "-o", out], out, "another sweep is there: it has other parameters")
    for old, new, problem in (
        ("steps: 4", "steps: 5", "it has other settings"),
        ("scenario: two-regions", f"scenario: {tmp_path / 'two-regions.yaml'}", "it has other settings"),
    ):
        write(tmp_path, SWEEP.replace(old, new))
        shutil.copytree(READY_FOLDER, tmp_path, dirs_exist_ok=True)
        with pytest.raises(InputError, match=problem):
            check_folder(out, read_sweep(tmp_path / "sweep.yaml"))
    # The same words, but a file that they name says something else.
    sweep = read_sweep(write(tmp_path, SWEEP.replace("two-regions", "two-regions.yaml")))
    write_sweep_json(tmp_path, sweep, 36, (), "sweep")
    check_folder(tmp_path, sweep)
    text = (tmp_path / "gpt-small.yaml").read_text()
    (tmp_path / "gpt-small.yaml").write_text(text.replace("repeat: 8", "repeat: 9"))
    with pytest.raises(InputError, match="a file that they name has changed since"):
        check_folder(tmp_path, sweep)


def test_two_at_a_time_do_not_share_a_folder(tmp_path: Path) -> None:
    write(tmp_path, LONG)
    arguments = ["sweep", str(tmp_path / "sweep.yaml"), "-o", str(tmp_path / "out"), "-j", "1"]
    with started(arguments, tmp_path) as (process, _):
        wait_until(lambda: (tmp_path / "out" / "sweep.json").exists(), "it does not begin")
        done = ropebridge("sweep", tmp_path / "sweep.yaml", "-o", tmp_path / "out")
        assert (done.returncode, "under way already" in done.stderr) == (2, True), done.stderr
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130


def test_a_sweep_without_a_point_that_goes_well_has_failed(tmp_path: Path) -> None:
    write(tmp_path, "scenario: two-regions\nstrategy: megatron\nparameters:\n  policy: {grid: [dept, nun]}\n")
    done = ropebridge("sweep", "sweep.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "none of 2 points" in done.stderr
    assert "did you mean 'depth'" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["sweep.yaml"]


def test_a_scenario_that_no_value_can_save_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("name: own\ncluster: {devices: []}\nmodel: absent.yaml\ntraining: {}\n")
    write(tmp_path, "scenario: own.yaml\nstrategy: megatron\nparameters:\n  policy: {grid: [none, depth]}\n")
    with pytest.raises(InputError, match=r"own.yaml:3: model: there is no such file: 'absent.yaml'"):
        read_sweep(tmp_path / "sweep.yaml")
    (tmp_path / "own.yaml").write_text("name: own\ncluster: {devices: []}\nmodel: {name: m}\ntraining: {}\n")
    refused(["sweep.yaml"], tmp_path, "own.yaml:2: cluster")


POLICY = """
from planner.systems.deepcee.policy import DepthPolicy

def policy(scenario):
    return {policy}
"""


def test_a_policy_of_one_s_own_is_swept_and_carried_out_anew_where_it_changed(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    own = tmp_path / "inside" / "own.py"
    own.write_text(POLICY.format(policy="DepthPolicy(scenario)"))
    # The command is called elsewhere: the file is beside the sweep's.
    path = write(
        tmp_path / "inside",
        "scenario: two-regions\nstrategy: megatron\nsteps: 4\n"
        "parameters:\n  policy: {grid: [none, depth, own.py, absent.py]}\n",
    )
    out = tmp_path / "out"
    assert carried_out(path, "-o", out)["carried_out"] == 4
    none, depth, owned, absent = rows(out)
    assert owned["samples_per_s"] == depth["samples_per_s"]
    assert none["status"] == "ok"
    assert "absent.py" in absent["error"]
    own.write_text(POLICY.format(policy="object()"))
    assert carried_out(path, "-o", out)["carried_out"] == 1
    assert "without 'decide'" in rows(out)[2]["error"]


def test_code_that_all_points_have_in_common(tmp_path: Path) -> None:
    path = write(
        tmp_path, "scenario: two-regions\nstrategy: megatron\npolicy: own.py\nparameters:\n  steps: {grid: [3, 4]}\n"
    )
    refused([path], tmp_path, "policy", "there is no file", "own.py")
    (tmp_path / "own.py").write_text(POLICY.format(policy="DepthPolicy(scenario)"))
    assert carried_out(path, "-o", tmp_path / "out")["failed"] == 0
    (tmp_path / "own.py").write_text(POLICY.format(policy="object()"))
    refused([path, "-o", "out"], tmp_path, "a file that they name has changed since")


def test_numbers_of_any_size_stand_in_the_table(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "scenario: two-regions\nstrategy: megatron\nsteps: 2\n"
        f"parameters:\n  training.global_batch: {{grid: [32, {10**30}, 64.5]}}\n",
    )
    carried_out(path, "-o", tmp_path / "out")
    assert [row["training.global_batch"] for row in rows(tmp_path / "out")] == ["32", str(10**30), "64.5"]
    assert [row["status"] for row in rows(tmp_path / "out")] == ["ok", "failed", "failed"]
