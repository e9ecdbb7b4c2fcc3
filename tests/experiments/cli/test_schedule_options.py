"""The order of actions through the real command: schedules by name, choosing devices, and orders from a file."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from planner.events.event import EventKind
from planner.events.file import EventFile
from planner.files.plan import read_plan
from planner.plan.actions import from_torch_csv
from planner.plan.plan import EXPLICIT
from planner.schedules import SCHEDULES, WHOLE
from tests.helpers.processes.command import ropebridge

SCENARIO = """
name: small
cluster:
  devices:
    - {name: left, kind: t4, region: west, memory: 16 GB}
    - {name: right, kind: v100-16, region: east, memory: 16 GB}
  links:
    - {between: [west, east], bandwidth: 100 Mbit/s, latency: 10 ms}
model:
  name: tiny
  layers:
    - {name: layer, repeat: 4, parameters: 4 MB, output: 1 MB, activation: 2 MB, forward: 1 GFLOP}
training: {global_batch: 8, microbatch: 4}
"""

needs_solver = pytest.mark.skipif(find_spec("ortools") is None, reason="OR-tools is not installed")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """Two devices, four layers, two microbatches."""
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


def changed(scenario: Path, old: str, new: str) -> Path:
    text = scenario.read_text()
    assert old in text
    scenario.write_text(text.replace(old, new))
    return scenario


def assert_refused(arguments: list[object], *expected: str) -> None:
    """Exit 2, and one line on stderr with all that is expected in it."""
    done = ropebridge(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for text in expected:
        assert text in done.stderr


def succeed(*arguments: object) -> str:
    done = ropebridge(*arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


# --- what is simulated ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(s, marks=needs_solver) if s == "optimal" else s for s in SCHEDULES])
def test_each_schedule_by_its_name(name: str, scenario: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    schedule = EXPLICIT if name == "optimal" else name
    assert schedule in succeed("simulate", scenario, "--strategy=megatron", "--schedule", name, "--steps", 2, "-o", run)
    # What the solver finds depends on the time it has, so the plan holds it.
    plan = read_plan(run / "plan.json")
    assert plan.schedule == schedule
    (pipeline,) = plan.pipelines
    assert bool(pipeline.orders) == (name == "optimal")
    assert pipeline.workers == {"interleaved-1f1b": (0, 1, 0, 1), "zb-v": (0, 1, 1, 0)}.get(name, (0, 1))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["schedule"] == plan.schedule
    assert summary["peak_memory_bytes"].keys() == {"left", "right"}
    states = 2 * 2 * 4_000_000
    for peak in summary["peak_memory_bytes"].values():
        # Two layers, and all activations of two microbatches at most.
        assert states < peak <= states + 2 * 4 * 2 * 2_000_000
    actions = {event.action for event in EventFile(run / "events.parquet") if event.kind is EventKind.COMPUTE}
    if name in WHOLE:
        assert actions == {"F", "B"}
    elif name not in ("compact-zb", "portfolio"):
        # Those two join an I and its W where that costs nothing.
        assert actions == {"F", "I", "W"}


@pytest.mark.parametrize(("more", "actions"), [([], {"F", "B"}), (["--schedule", "zb-h1"], {"F", "I", "W"})])
def test_devices_that_choose(more: list[str], actions: set[str], scenario: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeed("simulate", scenario, "--strategy=megatron", "--dynamic", *more, "--steps", 2, "-o", run)
    plan = read_plan(run / "plan.json")
    assert (plan.order, plan.schedule) == ("dynamic", more[-1] if more else "1f1b")
    events = EventFile(run / "events.parquet")
    assert {event.action for event in events if event.kind is EventKind.COMPUTE} == actions


def test_orders_go_round_through_a_file(scenario: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    named, carried = tmp_path / "named.json", tmp_path / "carried.json"
    succeed("plan", scenario, "--strategy=megatron", "--schedule", "zb-h1", "--torch-csv", first, "-o", named)
    succeed("plan", scenario, "--strategy=megatron", "--orders", first, "--torch-csv", second, "-o", carried)
    assert first.read_bytes() == second.read_bytes()
    assert read_plan(named).schedule == "zb-h1"
    assert read_plan(carried).schedule == EXPLICIT
    assert read_plan(carried).pipelines[0].orders == from_torch_csv(first.read_text())
    for folder, plan in (("a", named), ("b", carried)):
        succeed("simulate", scenario, "--plan", plan, "--steps", 2, "-o", tmp_path / folder)
    events = [(tmp_path / folder / "events.parquet").read_bytes() for folder in "ab"]
    assert events[0] == events[1]


def test_orders_of_devices_with_two_stages(scenario: Path, tmp_path: Path) -> None:
    plan, orders = tmp_path / "plan.json", tmp_path / "orders.csv"
    succeed("plan", scenario, "--strategy=megatron", "--schedule", "zb-v", "--torch-csv", orders, "-o", plan)
    for folder, more in (("a", []), ("b", ["--orders", orders])):
        succeed("simulate", scenario, "--plan", plan, *more, "--steps", 2, "-o", tmp_path / folder)
    events = [(tmp_path / folder / "events.parquet").read_bytes() for folder in "ab"]
    assert events[0] == events[1]
    assert_refused(
        ["plan", scenario, "--strategy=megatron", "--orders", orders], "orders.csv", "pipelines[0].orders[0]", "stage"
    )


# --- what is refused ------------------------------------------------------------------------------------------


def test_a_schedule_that_is_not_there(scenario: Path) -> None:
    assert_refused(
        ["simulate", scenario, "--strategy=megatron", "--schedule", "portfolo"],
        "--schedule",
        "did you mean 'portfolio'?",
        "1f1b",
    )


@pytest.mark.parametrize("more", [["--schedule", "1f1b"], ["--dynamic"]])
def test_a_file_of_orders_is_a_schedule(more: list[str], scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_text("0F0\n")
    arguments = ["plan", scenario, "--strategy=megatron", "--orders", tmp_path / "orders.csv", *more]
    assert_refused(arguments, "--orders is given with --schedule or --dynamic", "give one of them")


GOOD_ROWS = ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")

BAD_ORDERS = {
    "a circle": (
        ("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"),
        ["wait for each other in a cycle", "device 'left'", "device 'right'", "0B0", "1F1", "0F1"],
    ),
    "a backward too few": ((GOOD_ROWS[0], "1F0,1B0,1F1"), ["orders[1]", "microbatch 1 passes stage 1 with 1F1"]),
    "no action": ((GOOD_ROWS[0], "1F0,forward"), ["line 2", "'forward' is not an action"]),
}


@pytest.mark.parametrize("case", BAD_ORDERS)
def test_orders_that_cannot_be(case: str, scenario: Path, tmp_path: Path) -> None:
    rows, expected = BAD_ORDERS[case]
    (tmp_path / "orders.csv").write_text("\n".join(rows) + "\n")
    assert_refused(
        ["plan", scenario, "--strategy=megatron", "--orders", tmp_path / "orders.csv"], "orders.csv", *expected
    )


def test_a_file_of_orders_that_is_not_there(scenario: Path, tmp_path: Path) -> None:
    missing = tmp_path / "orders.csv"
    assert_refused(
        ["plan", scenario, "--strategy=megatron", "--orders", missing], f"ropebridge: {missing}: there is no such file"
    )


def test_devices_cannot_choose_where_the_plan_carries_orders(scenario: Path, tmp_path: Path) -> None:
    orders, plan = tmp_path / "orders.csv", tmp_path / "plan.json"
    orders.write_text("\n".join(GOOD_ROWS))
    succeed("plan", scenario, "--strategy=megatron", "--orders", orders, "-o", plan)
    assert_refused(["simulate", scenario, "--plan", plan, "--dynamic"], "--dynamic", "carries its own orders")
    succeed("simulate", scenario, "--plan", plan, "--dynamic", "--schedule", "1f1b", "--steps", 1)


def test_a_schedule_that_does_not_fit_into_memory(scenario: Path, tmp_path: Path) -> None:
    # 1 GB a sample and layer: a microbatch takes 4 GB of 16 GB, and a fourth one finds no room beside the states.
    changed(scenario, "activation: 2 MB", "activation: 1 GB")
    changed(scenario, "microbatch: 4", "microbatch: 2")
    forwards, backwards = (",".join(f"0{kind}{number}" for number in range(4)) for kind in "FB")
    rows = f"{forwards},{backwards}\n" + ",".join(f"1F{number},1B{number}" for number in range(4))
    (tmp_path / "orders.csv").write_text(rows)
    succeed("plan", scenario, "--strategy=megatron", "--schedule", "zb-h1")
    assert_refused(
        ["plan", scenario, "--strategy=megatron", "--schedule", "gpipe"], "pipelines[0].stages[0]", "'left'", "GiB"
    )
    assert_refused(
        ["plan", scenario, "--strategy=megatron", "--orders", tmp_path / "orders.csv"],
        "orders.csv",
        "stages[0]",
        "'left'",
        "GiB",
    )


def test_a_stage_of_one_layer_cannot_be_cut_in_two(scenario: Path) -> None:
    changed(scenario, "repeat: 4", "repeat: 3")
    assert_refused(
        ["plan", scenario, "--strategy=megatron", "--schedule", "zb-v"],
        "pipelines[0].stages[",
        "has one layer",
        "'zb-v'",
    )


@pytest.mark.parametrize("more", [["--schedule", "zb-h1"], ["--schedule", "zb-h1", "--dynamic"]])
def test_a_schedule_is_run_as_it_is_simulated(more: list[str], scenario: Path, tmp_path: Path) -> None:
    succeed("run", scenario, "--strategy=megatron", *more, "--compute", "paced", "--steps", 2, "-o", tmp_path / "real")
    succeed("simulate", scenario, "--strategy=megatron", *more, "--steps", 2, "-o", tmp_path / "simulated")
    done = {}
    for run in ("real", "simulated"):
        events = EventFile(tmp_path / run / "events.parquet")
        rows = [(e.step, e.device, e.action, e.stage, e.microbatch) for e in events if e.kind is EventKind.COMPUTE]
        done[run] = sorted(rows)
    assert done["real"] == done["simulated"]
    assert {action for _, _, action, _, _ in done["real"]} == {"F", "I", "W"}


def test_what_only_the_simulator_can_do_is_not_run(scenario: Path, tmp_path: Path) -> None:
    scenario.write_text(scenario.read_text() + "effects: {compute: {transfers_block: true}}\n")
    before = sorted(tmp_path.iterdir())
    arguments = ["run", scenario, "--strategy=megatron", "--compute", "paced", "-o", tmp_path / "run"]
    assert_refused(arguments, "effects.compute", "cannot be run yet", "or use 'ropebridge simulate'")
    assert sorted(tmp_path.iterdir()) == before


def test_measured_runs_that_are_not_there(tmp_path: Path) -> None:
    given = [part for name in ("runs", "times", "sizes", "network") for part in (f"--{name}", tmp_path / "nowhere")]
    assert_refused(["bench", "accuracy", *given], "nowhere: there")
    assert_refused(["bench", "accuracy", "--runs", tmp_path / "nowhere"], "ROPEBRIDGE_MEASURED")
