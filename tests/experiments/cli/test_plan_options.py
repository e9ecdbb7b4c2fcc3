"""What `ropebridge plan` can be asked for beyond a strategy, through the real command."""

import json
from pathlib import Path

import pytest

from planner.files.plan import read_plan
from tests.helpers.processes.command import ropebridge

SCENARIO = """
name: small
cluster:
  devices:
    - {name: left, kind: t4, region: west, price_usd_per_hour: 0.5}
    - {name: right, kind: t4, region: east, price_usd_per_hour: 2}
  links:
    - {between: [west, east], latency: 10 ms, trace: {steps: [{at: 0 s, bandwidth: 1 Gbit/s},
       {at: 500 s, bandwidth: 1 Mbit/s}], duration: 600 s}}
model:
  name: tiny
  layers:
    - {name: layer, repeat: 4, parameters: 4 MB, output: 0.1 MB, activation: 2 MB, forward: 100 GFLOP}
training: {global_batch: 8, microbatch: 2}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """Two equal devices, one of which costs four times as much, and a link that fails for a sixth of the time."""
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


def succeed(*arguments: object) -> str:
    done = ropebridge("plan", *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def devices_of(folder: Path, *arguments: object) -> tuple[str, ...]:
    succeed(*arguments, "--strategy", "auto", "-o", folder / "plan.json")
    return read_plan(folder / "plan.json").devices


def test_what_the_plan_is_best_in_decides_on_the_devices(scenario: Path, tmp_path: Path) -> None:
    both = {"left", "right"}
    assert set(devices_of(tmp_path, scenario)) == both
    assert devices_of(tmp_path, scenario, "--objective", "cost") == ("left",)
    assert devices_of(tmp_path, scenario, "--budget", 1) == ("left",)


def test_few_windows_may_be_slower_than_promised(scenario: Path) -> None:
    made = json.loads(succeed(scenario, "--strategy", "auto", "--robust", 0.05, "--explain", "--json"))
    assert [len(pipeline["stages"]) for pipeline in made["plan"]["pipelines"]] == [1]
    robust = made["explanation"]["robust"]
    assert (robust["quantile"], robust["windows"], robust["window_s"]) == (0.05, 10, 60.0)
    assert robust["samples_per_s"] == made["explanation"]["samples_per_s"]


def test_a_rate_that_one_device_does_not_reach_takes_both(scenario: Path, tmp_path: Path) -> None:
    alone = json.loads(succeed(scenario, "--strategy", "auto", "--objective", "cost", "--explain", "--json"))
    rate = 1.1 * alone["explanation"]["samples_per_s"]
    assert set(devices_of(tmp_path, scenario, "--objective", "cost", "--rate", rate)) == {"left", "right"}


def test_messages_are_rounded_only_where_the_scenario_allows_it(scenario: Path, tmp_path: Path) -> None:
    said = "messages between regions: int8"
    slow = scenario.read_text().replace("1 Gbit/s", "20 Mbit/s")
    scenario.write_text(slow)
    assert said not in succeed(scenario, "--strategy", "auto")
    scenario.write_text(slow.replace("global_batch: 8", "global_batch: 8, compressions: [none, int8]"))
    assert said in succeed(scenario, "--strategy", "auto", "-o", tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").compression == "int8"


def test_an_objective_without_a_strategy_is_one_of_auto(scenario: Path) -> None:
    wanted = ("--objective", "cost")
    assert succeed(scenario, *wanted) == succeed(scenario, "--strategy", "auto", *wanted)


def test_json_stays_the_plan_unless_its_explanation_is_asked_for(scenario: Path) -> None:
    asked = (scenario, "--strategy", "megatron")
    plan = json.loads(succeed(*asked, "--json"))
    both = json.loads(succeed(*asked, "--json", "--explain"))
    assert both["plan"] == plan
    assert both.keys() == {"plan", "explanation"}
    assert both["explanation"]["verdict"]["sentence"] in succeed(*asked, "--explain")


BAD = {
    "another strategy": (["--strategy", "ddp", "--robust", "0.1"], ["--robust", "'ddp'", "--strategy auto"]),
    "unknown objective": (
        ["--strategy", "auto", "--objective", "costs"],
        ["--objective", "'costs'", "did you mean 'cost'"],
    ),
    "no budget": (["--strategy", "auto", "--budget", "0"], ["--budget", "0", "above zero"]),
    "no number": (["--strategy", "auto", "--rate", "nan"], ["--rate", "nan", "above zero"]),
    "no share": (["--strategy", "auto", "--robust", "1"], ["--robust", "a quantile of 1", "below 1"]),
    "too fast": (
        ["--strategy", "auto", "--rate", "1e9"],
        ["the limits of the objective: at least 1e+09 samples/s; give a lower rate, or more devices"],
    ),
    "too dear": (
        ["--strategy", "auto", "--budget", "1e-9"],
        ["the limits of the objective: at most 1e-09 USD per hour; give a larger budget, or more devices"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_refused_in_one_line(scenario: Path, tmp_path: Path, case: str) -> None:
    arguments, expected = BAD[case]
    done = ropebridge("plan", scenario, *arguments, "-o", tmp_path / "plan.json")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for text in expected:
        assert text in done.stderr
    assert not (tmp_path / "plan.json").exists()
