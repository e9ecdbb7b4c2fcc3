"""A value at a place of a scenario or a plan stands for the file with this value written there."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from experiments.runs.scenario import choose_scenario
from experiments.scenarios import READY_FOLDER
from experiments.sweep.overrides import altered_plan, parse_path, with_value
from experiments.sweep.points import points_of
from experiments.sweep.sweep_file import read_sweep
from experiments.sweep.worker import PointTask, carry_out, scenario_of
from planner.files.plan import plan_json, write_plan
from planner.files.resolved_scenario import write_resolved_scenario
from planner.files.scenario import read_scenario
from planner.systems.registry import make_plan
from traces.common.errors import InputError

plain = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=12,
)


def places(tree: Any, keys: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    branches = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [keys, *(place for key, branch in branches for place in places(branch, (*keys, str(key))))]


def at(tree: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree


@given(plain, st.data())
def test_a_value_changes_its_place_and_nothing_else(tree: Any, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(places(tree)))
    before = json.dumps(tree)
    changed = with_value(tree, place, "new")
    assert json.dumps(tree) == before
    assert at(changed, place) == "new"
    for other in places(tree):
        if other[: len(place)] != place and place[: len(other)] != other:
            assert at(changed, other) == at(tree, other)
    assert with_value(changed, place, at(tree, place)) == tree


def resolved(scenario: Any, folder: Path) -> Any:
    write_resolved_scenario(scenario, folder / "resolved.json")
    return json.loads((folder / "resolved.json").read_text())


def by_sweep(scenario: str, values: dict[str, Any]) -> Any:
    return scenario_of(PointTask(Path(), {"scenario": scenario}, Path()), values)


def by_hand(folder: Path, scenario: str, change: Any) -> Any:
    """The scenario of files in which somebody has changed something; its model's file lies beside it."""
    document = yaml.safe_load((READY_FOLDER / f"{scenario}.yaml").read_text())
    model = yaml.safe_load((READY_FOLDER / document["model"]).read_text())
    model["code"] = str((READY_FOLDER / model["code"]).resolve())
    change(document, model)
    (folder / "model.yaml").write_text(yaml.safe_dump(model))
    (folder / "scenario.yaml").write_text(yaml.safe_dump({**document, "model": "model.yaml"}))
    return read_scenario(folder / "scenario.yaml")


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "a number": ({"training.global_batch": 96}, lambda s, m: s["training"].update(global_batch=96)),
    "a link by its ends": (
        {"cluster.links[edge-cloud].latency": "7 ms"},
        lambda s, m: s["cluster"]["links"][1].update(latency="7 ms"),
    ),
    "a trace": (
        {"cluster.links[1].trace.mean": "33 Mbit/s", "cluster.links[edge-end].trace.seed": 5},
        lambda s, m: (
            s["cluster"]["links"][1]["trace"].update(mean="33 Mbit/s"),
            s["cluster"]["links"][2]["trace"].update(seed=5),
        ),
    ),
    "a device by its name": (
        {"cluster.devices[edge-small].kind": "t4"},
        lambda s, m: s["cluster"]["devices"][2].update(kind="t4"),
    ),
    "a part in another file": (
        {"model.layers[block].repeat": 5, "model.name": "other"},
        lambda s, m: (m["layers"][1].update(repeat=5), m.update(name="other")),
    ),
    "what the file leaves out": (
        {"training.optimizer.schedule.warmup_steps": 3, "effects.compute.jitter": 0.1},
        lambda s, m: (
            s["training"]["optimizer"].update(schedule={"warmup_steps": 3}),
            s.update(effects={"compute": {"jitter": 0.1}}),
        ),
    ),
    "a part of a base": (
        {"effects.network.window": "1 MB", "effects.network": "tcp"},
        lambda s, m: s.update(effects={"network": {"base": "tcp", "window": "1 MB"}}),
    ),
    "a key that is removed": (
        {"cluster.links[edge-cloud].price_usd_per_gb": None, "effects": None},
        lambda s, m: s["cluster"]["links"][1].pop("price_usd_per_gb"),
    ),
    "a whole and a part of it": (
        {"cluster.links[1].trace.mean": "50 Mbit/s", "cluster.links[1].trace": {"preset": "5g"}},
        lambda s, m: s["cluster"]["links"][1].update(trace={"preset": "5g", "mean": "50 Mbit/s"}),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_point_has_the_scenario_of_a_file_changed_by_hand(case: str, tmp_path: Path) -> None:
    values, change = CASES[case]
    expected = resolved(by_hand(tmp_path, "cloud-edge-end-small", change), tmp_path)
    assert resolved(by_sweep("cloud-edge-end-small", values), tmp_path) == expected
    assert resolved(choose_scenario("cloud-edge-end-small"), tmp_path) != expected


def test_a_part_can_be_another_file(tmp_path: Path) -> None:
    assert by_sweep("two-regions", {"model": "gpt-768.yaml"}).model.name == "gpt-768"
    layers = by_sweep("two-regions", {"model.layers[block].repeat": 2, "model": "gpt-768.yaml"}).model.layers
    assert [layer.name for layer in layers] == ["embedding", "block-0", "block-1", "head"]


def test_a_wrong_value_says_where_it_would_stand() -> None:
    with pytest.raises(InputError, match=r"two-regions.yaml:18: training.global_batch: 'many' is not valid"):
        by_sweep("two-regions", {"training.global_batch": "many"})
    with pytest.raises(InputError, match=r"gpt-small.yaml:8: layers\[1\].forward: '3' has no unit"):
        by_sweep("two-regions", {"model.layers[block].forward": "3"})


def test_a_plan_is_altered_in_its_file_s_words() -> None:
    scenario = choose_scenario("two-regions")
    plan = make_plan("megatron", scenario)
    values = {"connections": 4, "compression": "int8", "pipelines[0].stages[1].in_flight": 1}
    altered = altered_plan(plan, {parse_path(name, ""): value for name, value in values.items()}, scenario)
    expected = json.loads(plan_json(plan)) | {"connections": 4, "compression": "int8"}
    expected["pipelines"][0]["stages"][1]["in_flight"] = 1
    assert json.loads(plan_json(altered)) == expected


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("connections", 0, "plan: connections: 0 connections"),
        ("connections", "many", "plan: connections: 'many' is not valid"),
        ("pipelines[7].microbatches", [8], "plan: pipelines: there is no element 7"),
        ("compression", "int4", "did you mean 'int8'"),
    ],
)
def test_a_plan_that_does_not_fit_any_more(path: str, value: Any, message: str) -> None:
    scenario = choose_scenario("two-regions")
    with pytest.raises(InputError) as refusal:
        altered_plan(make_plan("megatron", scenario), {parse_path(path, ""): value}, scenario)
    assert message in str(refusal.value)


def test_scenarios_and_plans_can_be_swept(tmp_path: Path) -> None:
    for name in ("two-regions", "cloud-edge-end-small"):
        write_plan(make_plan("gpipe", choose_scenario(name)), tmp_path / f"{name}.json")
    values = {
        "scenario": ["two-regions", "cloud-edge-end-small", "two-regions", "two-regions"],
        "plan": ["two-regions.json", "cloud-edge-end-small.json", "cloud-edge-end-small.json", None],
        "strategy": [None, None, None, "gpipe"],
        "steps": [2, 2, 2, None],
        "duration": [None, None, None, "1 ms"],
    }
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"parameters": {name: {"list": each} for name, each in values.items()}}))
    sweep = read_sweep(path)
    outcomes = [carry_out(PointTask(sweep.folder, sweep.common, tmp_path), point) for point in points_of(sweep)]
    assert [outcome.metrics.get("plan_devices") for outcome in outcomes] == [2, 4, None, 2]
    assert "cloud-edge-end-small.json (made for scenario 'cloud-edge-end-small')" in outcomes[2].error
    assert [outcome.metrics.get("steps_done") for outcome in outcomes] == [2, 2, None, 1]
