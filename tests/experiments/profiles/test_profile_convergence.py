"""`ropebridge profile convergence`: real runs, kept one by one, and a file that a scenario can name."""

import json
from pathlib import Path

import pytest

from planner.files.scenario import read_scenario
from tests.experiments.cli.test_plan_options import SCENARIO as WITHOUT_CODE
from tests.helpers.processes.command import ropebridge

SCENARIO = """
name: letters
cluster:
  devices:
    - {name: left, kind: cpu, region: west}
    - {name: right, kind: cpu, region: east}
  kinds: {cpu: {peak: 1 TFLOP/s, memory: 8 GiB, memory_bandwidth: 20 GB/s}}
  links: [{between: [west, east], bandwidth: 100 Mbit/s, latency: 10 ms}]
model: MODEL
training: {global_batch: 16, microbatch: 8, optimizer: {name: adamw, learning_rate: 0.003}}
"""
OPTIONS = ("--workers", "2", "--intervals", "2,4", "--methods", "diloco", "--steps", "24", "--seeds", "1")


def scenario_with_code(folder: Path) -> Path:
    model = Path("experiments/models/characters.py").resolve()
    settings = ("--set", "width=16", "--set", "blocks=1", "--set", "length=16", "--samples", "8", "--repeats", "1")
    done = ropebridge("profile", "model", model, *settings, "-o", folder / "model.yaml")
    assert done.returncode == 0, done.stderr
    path = folder / "letters.yaml"
    path.write_text(SCENARIO.replace("MODEL", "model.yaml"))
    return path


@pytest.mark.slow
def test_runs_are_kept_and_the_scenario_names_the_law(tmp_path: Path) -> None:
    scenario, output = scenario_with_code(tmp_path), tmp_path / "loss.json"
    done = ropebridge("profile", "convergence", scenario, "-o", output, *OPTIONS)
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text())
    assert [run["method"] for run in content["runs"]] == ["allreduce", *["diloco"] * 4]
    assert len({(run.get("interval_steps"), run.get("momentum")) for run in content["runs"]}) == 5
    assert all(run["losses"][-1] < run["losses"][0] for run in content["runs"])
    # As if it had been killed before the last run.
    kept = {**content, "law": None, "runs": content["runs"][:-1]}
    output.write_text(json.dumps(kept))
    again = ropebridge("profile", "convergence", scenario, "-o", output, *OPTIONS)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("run ") == 1
    assert json.loads(output.read_text())["runs"] == content["runs"]
    scenario.write_text(scenario.read_text().replace("microbatch: 8", "microbatch: 8, convergence: loss.json"))
    law = read_scenario(scenario).training.convergence
    assert law is not None
    assert law.methods == ("allreduce", "diloco")
    other = ropebridge("profile", "convergence", scenario, "-o", output, *OPTIONS[:-4], "--steps", "25", "--seeds", "1")
    assert other.returncode == 2
    assert "another model, training or number of steps" in other.stderr


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    without_code = tmp_path / "small.yaml"
    without_code.write_text(WITHOUT_CODE)
    for options, message in (
        ((without_code, "-o", tmp_path / "loss.json"), "has no code"),
        (("two-clouds-llama", "-o", tmp_path / "loss.json"), "do not fit into 50% of this machine's memory"),
        (("two-regions", "-o", tmp_path / "loss.yaml"), "does not end in .json"),
        (("two-regions", "-o", tmp_path / "loss.json", "--workers", "1,2"), "--workers: '1,2' is not allowed"),
        (("two-regions", "-o", tmp_path / "loss.json", "--methods", "asgd"), "--methods"),
        (("two-regions", "-o", tmp_path / "loss.json", "--methods", "diloco-decoupled"), "--methods"),
        (("two-regions", "-o", tmp_path / "loss.json", "--intervals", "200"), "--intervals"),
    ):
        done = ropebridge("profile", "convergence", *options)
        assert done.returncode == 2, message
        assert message in done.stderr
    assert list(tmp_path.iterdir()) == [without_code]
