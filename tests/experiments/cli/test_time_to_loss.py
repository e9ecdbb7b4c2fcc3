"""`ropebridge plan` to a loss, through the real command: what it needs, what it says, and what it refuses."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from planner.files.plan import read_plan
from tests.experiments.cli.test_plan_options import SCENARIO
from tests.helpers.processes.command import ropebridge

LAW: dict[str, Any] = {
    "source": "40 runs",
    "reference_samples": 1000.0,
    "mean": [0.0, 0.0, math.log(0.5), -50.0, 0.0, 0.0, 0.01, 0.004, 0.0, 0.0, 0.0, 0.0, 0.0],
    "draws": [
        [0.0, 0.0, math.log(0.5), -50.0, 0.0, 0.0, 0.01, each, 0.0, 0.0, 0.0, 0.0, 0.0] for each in (0.002, 0.006)
    ],
    "methods": ["diloco"],
    "compressions": ["none"],
    "most_interval": 50,
    "most_workers": 4,
    "least_loss": 1.4,
    "momenta": [0.9],
    "knots": [],
}
FILE: dict[str, Any] = {"version": 3, "model": "tiny", "task": "", "global_batch": 8, "runs": [], "law": LAW}
GOAL = ("--strategy", "auto", "--objective", "time-to-loss", "--loss")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """Two devices, and the law of their task."""
    (tmp_path / "loss.json").write_text(json.dumps(FILE))
    path = tmp_path / "small.yaml"
    slow = SCENARIO.replace("bandwidth: 1 Gbit/s", "bandwidth: 5 Mbit/s")
    path.write_text(slow.replace("microbatch: 2}", "microbatch: 2, convergence: loss.json}"))
    return path


@pytest.mark.slow
def test_a_measured_law_decides_and_is_explained(scenario: Path, tmp_path: Path) -> None:
    done = ropebridge("plan", scenario, *GOAL, 1.5, "--explain", "-o", tmp_path / "plan.json")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("to a loss of 1.5: ", "convergence: 40 runs", "statistics: ", "network: ", "together: "):
        assert part in done.stdout
    plan = read_plan(tmp_path / "plan.json")
    assert plan.synchronisation.method == "diloco"
    assert plan.synchronisation.interval_steps <= 50
    assert "measured convergence" in plan.strategy


@pytest.mark.parametrize(("key", "wrong"), [("compressions", "zip"), ("methods", "dilco")])
def test_a_law_of_what_does_not_exist_is_refused(scenario: Path, tmp_path: Path, key: str, wrong: str) -> None:
    law = {**FILE["law"], key: [*FILE["law"][key], wrong]}
    (tmp_path / "loss.json").write_text(json.dumps({**FILE, "law": law}))
    refused = ropebridge("plan", scenario, *GOAL, 1.5)
    assert refused.returncode == 2
    assert f"loss.json: {key}: unknown" in refused.stderr
    assert f"'{wrong}'" in refused.stderr


def test_without_a_law_the_command_refuses(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    refused = ropebridge("plan", path, *GOAL, 6)
    assert refused.returncode == 2
    assert "profile convergence" in refused.stderr
    assert "--assume-convergence" in refused.stderr


@pytest.mark.slow
def test_published_laws_are_taken_if_asked_for_and_the_plan_says_so(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    made = ropebridge("plan", path, *GOAL, 6, "--assume-convergence", 64, "--explain", "--json")
    assert made.returncode == 0, made.stderr
    document = json.loads(made.stdout)
    assert document["to_loss"]["assumed"] is True
    assert "assumed convergence" in document["plan"]["strategy"]
    assert document["to_loss"]["plan"]["steps"]["least"] < document["to_loss"]["plan"]["steps"]["most"]
    told = ropebridge("plan", path, *GOAL, 6, "--assume-convergence", 64)
    assert "assumed convergence: published laws" in told.stdout
    below = ropebridge("plan", path, *GOAL, 0.5, "--assume-convergence", 64)
    assert below.returncode == 2
    assert "no method reaches a loss of 0.5" in below.stderr


BAD = {
    "no loss": (GOAL[:-1], "needs a loss"),
    "another objective": ((*GOAL[:2], "--loss", "2"), "--loss: it has no meaning"),
    "both": ((*GOAL, "2", "--assume-convergence", "64"), "names a convergence file"),
    "robust": ((*GOAL, "2", "--robust", "0.1"), "--robust: it does not fit"),
    "not a loss": ((*GOAL, "-1"), "--loss: -1 is not allowed"),
}


@pytest.mark.parametrize("case", BAD)
def test_other_options_are_refused(scenario: Path, case: str) -> None:
    options, message = BAD[case]
    done = ropebridge("plan", scenario, *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": 1}, "the file has version 1"),
    "unfinished": ({"law": None}, "have not all finished"),
    "few numbers": ({"law": {**LAW, "draws": [[1.0]]}}, "law.draws[0]"),
    "a knot without its correction": ({"law": {**LAW, "knots": [0.0]}}, "do not match its knots"),
    "key": ({"laws": 1}, "unknown key 'laws'"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_damaged_file_is_refused(scenario: Path, case: str) -> None:
    change, message = BAD_FILES[case]
    (scenario.parent / "loss.json").write_text(json.dumps({**FILE, **change}))
    done = ropebridge("plan", scenario)
    assert done.returncode == 2
    assert message in done.stderr
    assert "loss.json" in done.stderr
