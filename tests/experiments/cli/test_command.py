"""The command as a person uses it: real processes, real files."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from executor.deploy.target import TARGETS
from experiments.cli import app, options
from experiments.runs.scenario import DEFAULT_STRATEGY
from experiments.verbs import demo
from experiments.verbs.bench import BENCHES, REPRODUCTIONS
from planner.plan.actions import from_torch_csv
from planner.schedules import SCHEDULES
from planner.systems.registry import POLICIES, STRATEGIES
from tests.helpers.processes.command import COMMAND, ropebridge
from traces.formats import FORMATS

LOADED = """
import sys
from experiments.cli.app import main
sys.argv = ["ropebridge", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print(*sorted(sys.modules), file=sys.stderr)
"""


def loaded_modules(*arguments: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_loads_nothing_heavy() -> None:
    assert loaded_modules("--help").isdisjoint({"torch", "matplotlib", "numpy", "pandas", "pydantic", "simpy", "scipy"})


def test_help_names_everything_there_is() -> None:
    text = " ".join(ropebridge(verb, "--help").stdout for verb in ("simulate", "run", "bench", "reproduce"))
    text += ropebridge("traces", "convert", "--help").stdout
    for name in (*STRATEGIES, *POLICIES, *BENCHES, *REPRODUCTIONS, *FORMATS):
        assert name in text


def test_the_names_that_shells_complete_are_those_that_there_are() -> None:
    assert set(options.STRATEGIES) == set(STRATEGIES)
    assert set(options.POLICIES) == set(POLICIES)
    assert set(options.SCHEDULES) == set(SCHEDULES)
    assert set(options.TARGETS) == set(TARGETS)
    assert set(options.RIVALS) < set(STRATEGIES)
    assert set(app.BENCHES) == set(BENCHES)
    assert set(app.SYSTEMS) == set(REPRODUCTIONS)
    assert options.STRATEGIES[0] == DEFAULT_STRATEGY


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (("dep",), ["deploy"]),
        (("simulate", "cloud-edge-end-"), ["cloud-edge-end-small"]),
        (("plan", "two-regions", "--strategy", "asteroid"), ["asteroid", "asteroid-duplex"]),
        (("run", "digits", "--policy", "dee"), ["deepcee"]),
    ],
)
def test_shells_complete_names(words: tuple[str, ...], completions: list[str]) -> None:
    line = " ".join(("ropebridge", *words))
    asked = {"_ROPEBRIDGE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
    done = subprocess.run(COMMAND, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completions


def test_help_groups_the_verbs_in_the_order_of_their_use() -> None:
    text = ropebridge("--help").stdout
    titles = ("Start here:", "Plan and simulate:", "Run and deploy:", "Data:", "Measure:")
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert places[0] < text.index("  demo ") < places[1] < text.index("  plan ") < text.index("  simulate ") < places[2]
    for name in typer.main.get_command(app.app).commands:
        assert text.count(f"\n  {name} ") == 1


def test_the_version() -> None:
    done = ropebridge("--version")
    assert (done.returncode, done.stdout) == (0, f"ropebridge {version('ropebridge')}\n")


def test_a_drop_and_recovery_of_the_link_is_worth_adapting_to(tmp_path: Path) -> None:
    throughput = {}
    for policy in ("none", "depth"):
        done = ropebridge("simulate", "two-regions", "--strategy=megatron", "--policy", policy, "--steps", 50, "--json")
        throughput[policy] = json.loads(done.stdout)["samples_per_s"]
    assert throughput["depth"] > 1.05 * throughput["none"]


def test_a_schedule_for_torch(tmp_path: Path) -> None:
    assert (
        ropebridge("plan", "two-regions", "--strategy=megatron", "--torch-csv", tmp_path / "schedule.csv").returncode
        == 0
    )
    ranks = from_torch_csv((tmp_path / "schedule.csv").read_text())
    assert [str(action) for action in ranks[0][:3]] == ["0F0", "0F1", "0B0"]
    assert [len(actions) for actions in ranks] == [16, 16]


def test_simulating_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        arguments = [
            "simulate",
            "cloud-edge-end-small",
            "--strategy=megatron",
            "--policy",
            "depth",
            "-o",
            tmp_path / name,
        ]
        assert ropebridge(*arguments).returncode == 0
    for file in ("events.parquet", "decisions.jsonl", "scenario.json", "plan.json", "summary.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_the_same_plan_file_is_simulated_and_run(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert ropebridge("plan", "two-regions", "--strategy", "pipedream", "-o", plan).returncode == 0
    before = plan.read_bytes()
    common = ["two-regions", "--plan", plan, "--steps", 4, "--json", "-o"]
    simulated = ropebridge("simulate", *common, tmp_path / "simulated")
    real = ropebridge("run", *common, tmp_path / "real", "--compute", "paced", "--emulate-wan")
    assert (simulated.returncode, real.returncode) == (0, 0), real.stderr
    assert plan.read_bytes() == before
    summaries = [json.loads(done.stdout) for done in (simulated, real)]
    assert summaries[0]["wan_bytes"] == summaries[1]["wan_bytes"] > 0
    for folder in ("simulated", "real"):
        assert json.loads((tmp_path / folder / "plan.json").read_text()) == json.loads(before)

    compared = ropebridge("compare", tmp_path / "simulated", tmp_path / "real", "--json")
    rows = json.loads(compared.stdout)
    assert [row["backend"] for row in rows] == ["simulated", "paced"]
    assert rows[0]["step_ratio"] == 1
    report = ropebridge("report", tmp_path / "simulated", tmp_path / "real", "-o", tmp_path / "both.png")
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_runs_are_told_apart_by_their_policies(tmp_path: Path) -> None:
    for policy in ("none", "depth"):
        done = ropebridge("simulate", "two-regions", "--strategy=megatron", "--policy", policy, "-o", tmp_path / policy)
        assert (" of policy depth" in done.stdout) is (policy == "depth"), done.stderr
    folders = tmp_path / "none", tmp_path / "depth"
    rows = json.loads(ropebridge("compare", *folders, "--json").stdout)
    assert [row["policy"] for row in rows] == ["none", "depth"]
    assert "policy" in ropebridge("compare", *folders).stdout.splitlines()[0]


def test_the_resolved_scenario_of_a_run_is_a_scenario(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert ropebridge("simulate", "two-regions", "--strategy=megatron", "-o", first).returncode == 0
    again = ropebridge("simulate", first / "scenario.json", "--plan", first / "plan.json", "-o", second)
    assert again.returncode == 0, again.stderr
    assert (first / "events.parquet").read_bytes() == (second / "events.parquet").read_bytes()


def test_training_writes_the_parameters(tmp_path: Path) -> None:
    done = ropebridge(
        "run", "two-regions", "--strategy=megatron", "--on-this-device", "--steps", 2, "--json", "-o", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout)["losses"]
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    assert (tmp_path / "run" / "parameters.safetensors").stat().st_size > 6_000_000


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer of its steps, which take a second each."""
    monkeypatch.setattr(demo, "DEMO_STEPS", 6)
    monkeypatch.setattr(demo, "REAL_STEPS", 2)
    done = ropebridge("demo", "--json", "-o", tmp_path / "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for side in ("simulated", "real"):
        assert {"step_s", "samples_per_s", "bubble_ratio", "wan_bytes"} <= result[side].keys()
    folders = [tmp_path / "demo" / f"{side}-fixed" for side in ("simulated", "real")]
    fixed = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    assert fixed[0]["wan_bytes"] == fixed[1]["wan_bytes"]
    assert {each["steps"] for each in (*fixed, result["simulated"], result["real"])} == {6}
    assert result["gain"].keys() == {"simulated", "real"}
    assert result["loss_last"] < result["loss_first"]
    for name in (
        "plan.json",
        "report.html",
        "report.png",
        "perfetto.json",
        "demo.json",
        "simulated",
        "real",
        "trained",
    ):
        assert (tmp_path / "demo" / name).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_step_of_traces(tmp_path: Path) -> None:
    made = ropebridge("traces", "generate", "satellite", "-o", "link.csv", "--duration", "60 s", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert ropebridge("traces", "convert", "link.csv", "link.mahi", cwd=tmp_path).returncode == 0
    shown = ropebridge("traces", "show", "link.mahi", "--plot", "link.png", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["duration_s"] == pytest.approx(60, abs=0.01)
    assert (tmp_path / "link.png").exists()
    changed = ropebridge(
        "traces",
        "generate",
        "constant",
        "--set",
        "bandwidth=5 Mbit/s",
        "-o",
        "flat.cooked",
        "--duration",
        "20 s",
        cwd=tmp_path,
    )
    assert changed.returncode == 0, changed.stderr
