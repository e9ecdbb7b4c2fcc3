"""The module `ropebridge`: its examples run, its names are there, and loading it is quick."""

import doctest
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import ropebridge
from planner.adapt.observation import Observation
from planner.plan.plan import Plan

README = Path(__file__).parents[2] / "README.md"
HEAVY = ("torch", "matplotlib", "bokeh", "numba", "llvmlite", "numpy", "pandas", "pyarrow", "pydantic")
EXAMPLES = {
    test.name.removeprefix("ropebridge."): test
    for test in doctest.DocTestFinder().find(ropebridge, extraglobs={"rb": ropebridge, "Path": Path})
    if test.examples
}
FUNCTIONS = [name for name in ropebridge.__all__ if name[0].islower()]


def run_example(name: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(EXAMPLES[name])
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "run"])
def test_the_example_of_a_function_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_example(name)


def test_the_example_of_run_runs() -> None:
    run_example("run")


def test_every_name_is_there() -> None:
    assert dir(ropebridge) == sorted(ropebridge.__all__)
    for name in ropebridge.__all__:
        assert getattr(ropebridge, name).__doc__


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'simulator'; it has .*simulate"):
        _ = ropebridge.simulator


def test_loading_it_loads_nothing_that_takes_time() -> None:
    program = f"import sys, ropebridge; print(sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "call",
    [
        lambda: ropebridge.simulate("two-region", steps=1),
        lambda: ropebridge.simulate("two-regions", "megatronn", steps=1),
        lambda: ropebridge.simulate("two-regions", "megatron", policy="dept", steps=1),
        lambda: ropebridge.read_scenario("two-regions", network="tpc"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(call: Callable[[], object]) -> None:
    with pytest.raises(ropebridge.RopebridgeError, match="did you mean"):
        call()


@pytest.mark.parametrize("verb", [ropebridge.simulate, ropebridge.run])
@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_are_refused(verb: Callable[..., object], steps: int) -> None:
    with pytest.raises(ropebridge.RopebridgeError, match=r"steps: .* is not allowed; give 1 or more"):
        verb("two-regions", "megatron", steps=steps)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: ropebridge.simulate("two-regions", "megatron", steps=1.5),
            "steps: 1.5 is not allowed; give 1 or more",
        ),
        (lambda: ropebridge.simulate("two-regions", "megatron", steps=True), "steps: True is not allowed"),
        (lambda: ropebridge.simulate("two-regions", None), "None is no plan; give a plan's object or file"),
        (lambda: ropebridge.simulate(None), "None is no scenario"),
        (lambda: ropebridge.simulate("two-regions", "megatron", object(), 2), "without 'decide'"),
        (lambda: ropebridge.simulate("two-regions", "megatron", Deciding(7), 2), "'decide' at step 0 returns neither"),
        (lambda: ropebridge.simulate("two-regions", "megatron", Deciding, 2), "without 'decide'"),
        (lambda: ropebridge.run("two-regions", "megatron", steps=2, compute="reel"), "did you mean 'real'?"),
        (lambda: ropebridge.run("two-regions", "megatron", steps=2, compute=None), "unknown kind of compute 'None'"),
        (ropebridge.compare, "no run is given"),
        (lambda: ropebridge.compare(3), "3 is no run"),
        (lambda: ropebridge.report([], "page.html"), "no run is given"),
        (lambda: ropebridge.report(None, "page.html"), "None is no run"),
        (lambda: ropebridge.report([], None), "no run is given"),
        (
            lambda: ropebridge.simulate("two-regions", "megatron", steps="3"),
            "steps: '3' is not allowed; give 1 or more",
        ),
        (lambda: ropebridge.simulate("two-regions", "megatron", steps=1, folder=3), "folder: 3 is not allowed"),
        (lambda: ropebridge.read_scenario(3), "name: 3 is not allowed; give a path or a ready scenario's name"),
        (lambda: ropebridge.read_scenario("two-regions", network=["tcp"]), "unknown network '['tcp']'"),
        (lambda: ropebridge.read_trace(None), "path: None is not allowed; give a path"),
        (lambda: ropebridge.make_plan(None, "two-regions"), "strategy: None is not allowed; give a strategy's name"),
        (lambda: ropebridge.make_policy(3, "two-regions"), "policy: 3 is not allowed; give a policy's name"),
        (lambda: ropebridge.read_plan(None), "path: None is not allowed"),
        (lambda: ropebridge.write_plan("plan.json", None), "'plan.json' is no plan"),
        (lambda: ropebridge.read_run(None), "folder: None is not allowed"),
        (lambda: ropebridge.sweep(None), "path: None is not allowed"),
        (lambda: ropebridge.backtest("two-regions", None), "traces: None is not allowed"),
        (lambda: ropebridge.backtest("two-regions", "traces", "auto"), "policies: 'auto' is not allowed; give a list"),
    ],
)
def test_a_wrong_argument_is_one_line(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ropebridge.RopebridgeError) as refused:
        call()
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


class Deciding:
    """A policy that answers everything with one value."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def decide(self, observation: Observation, plan: Plan) -> object:
        return self._answer


def test_a_plan_of_a_policy_with_lists_is_refused_before_it_is_used() -> None:
    plan = ropebridge.make_plan("megatron", "two-regions")
    odd = replace(plan, pipelines=tuple(replace(p, microbatches=list(p.microbatches)) for p in plan.pipelines))
    with pytest.raises(ropebridge.RopebridgeError, match=r"policy Deciding: 'decide' at step 0 returns .*microbatches"):
        ropebridge.simulate("two-regions", plan, Deciding(odd), 2)


def test_runs_are_compared_and_reported_by_their_folders(tmp_path: Path) -> None:
    record = ropebridge.simulate("two-regions", "megatron", steps=2, folder=tmp_path / "one")
    pd.testing.assert_frame_equal(ropebridge.compare(tmp_path / "one"), ropebridge.compare(record))
    ropebridge.report(iter([tmp_path / "one", record]), tmp_path / "runs.json")
    assert (tmp_path / "runs.json").stat().st_size > 1000


def test_a_run_at_the_end_of_a_cell_is_one_short_line() -> None:
    run = ropebridge.simulate("two-regions", "megatron", steps=2)
    assert repr(run) == "<simulated run of two-regions (megatron, 1f1b)>"


def test_a_plan_of_another_scenario_is_refused() -> None:
    plan = ropebridge.make_plan("megatron", "two-regions")
    with pytest.raises(ropebridge.RopebridgeError, match="west-gpu"):
        ropebridge.simulate("cloud-edge-end-small", plan, steps=1)


def test_the_readme_s_ten_lines_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In few steps; the block's last expression is the table that a notebook shows."""
    section = README.read_text().partition("## Ten lines in Python")[2]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    lines = block.replace("steps=50", "steps=3").splitlines()
    assert len(lines) <= 10
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec("\n".join(lines[:-1]), names)
    table = eval(lines[-1], names)
    assert isinstance(table, pd.DataFrame)
    assert table.index.tolist() == ["simulated", "paced"]
    # Unused links are probed once a second at most, so that a run that takes longer sends more probes.
    probes = (run.event_frame.query("kind == 'send' and action == 'P'") for run in (names["simulated"], names["real"]))
    trained_bytes = table.wan_bytes - [int(frame.size_bytes.sum()) for frame in probes]
    assert trained_bytes.nunique() == 1
    assert trained_bytes.min() > 1e7
    assert (tmp_path / "both.html").stat().st_size > 1e6
