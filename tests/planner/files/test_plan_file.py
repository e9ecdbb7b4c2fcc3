import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.files.plan import parse_plan, plan_json, plan_schema, read_plan, write_plan
from planner.plan.actions import Action, Kind, parse_action
from planner.plan.plan import SCHEMA_VERSION, Pipeline, Plan, Replica, Stage, Synchronisation
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import InputError

NAMES = st.lists(st.text(), max_size=2).map(tuple)
REPLICAS = st.builds(Replica, st.text(), st.floats(allow_nan=False, allow_infinity=False), NAMES)
ACTIONS = st.builds(Action, st.integers(0, 99), st.sampled_from(Kind), st.integers(0, 10**6))
ORDERS = st.lists(st.lists(ACTIONS, max_size=4).map(tuple), max_size=3).map(tuple)
SYNCHRONISATIONS = st.builds(Synchronisation, st.text(), st.text(), st.integers(), st.none() | st.integers())
STAGES = st.builds(
    Stage, st.integers(), st.integers(), st.lists(REPLICAS, max_size=3).map(tuple), st.integers(0, 2**40), st.booleans()
)
PIPELINES = st.builds(
    Pipeline, st.lists(STAGES, max_size=3).map(tuple), st.lists(st.integers(), max_size=5).map(tuple), ORDERS
)
PLANS = st.builds(
    Plan,
    st.text(),
    st.text(),
    st.text(),
    st.text(),
    st.lists(PIPELINES, max_size=2).map(tuple),
    st.text(),
    SYNCHRONISATIONS,
    st.integers(),
    st.text(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(plan=PLANS)
def test_a_plan_and_back(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert parse_plan(plan_json(plan)) == plan


def test_a_plan_says_what_is_special_about_it() -> None:
    plan = chain_plan(chain_scenario([1.0], [1.0], global_batch=2))
    plain = {
        "version": 2,
        "scenario": "chain",
        "model": "chain",
        "strategy": "hand",
        "schedule": "1f1b",
        "pipelines": [
            {
                "stages": [{"first_layer": 0, "end_layer": 1, "replicas": [{"device": "device-0"}], "in_flight": 1}],
                "microbatches": [1, 1],
            }
        ],
    }
    assert json.loads(plan_json(plan)) == plain
    orders = ((parse_action("0F0"), parse_action("0I0"), parse_action("0W0")),)
    stage = replace(plan.pipelines[0].stages[0], replicas=(Replica("device-0", 0.5, ("device-1",)),))
    special = replace(
        plan,
        schedule="explicit",
        pipelines=(Pipeline((stage,), (2,), orders),),
        synchronisation=Synchronisation("asgd-ga", interval_steps=4, staleness_bound=2),
        connections=8,
    )
    assert json.loads(plan_json(special)) == {
        **plain,
        "schedule": "explicit",
        "pipelines": [
            {
                "stages": [
                    {
                        "first_layer": 0,
                        "end_layer": 1,
                        "replicas": [{"device": "device-0", "share": 0.5, "partners": ["device-1"]}],
                        "in_flight": 1,
                    }
                ],
                "microbatches": [2],
                "orders": [["0F0", "0I0", "0W0"]],
            }
        ],
        "synchronisation": {"method": "asgd-ga", "interval_steps": 4, "staleness_bound": 2},
        "connections": 8,
    }


def test_a_plan_with_its_defaults_written_out_reads_the_same(tmp_path: Path) -> None:
    plan = chain_plan(chain_scenario([1.0], [1.0], global_batch=2))
    data = json.loads(plan_json(plan))
    data["pipelines"][0]["orders"] = []
    data["pipelines"][0]["stages"][0]["replicas"][0].update(share=1.0, partners=[])
    data["synchronisation"] = {"method": "allreduce", "algorithm": "ring", "interval_steps": 1, "staleness_bound": None}
    data.update(order="scheduled", connections=1)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["2X0", "F0", "2F", "", "-1F0", {"stage": 2}, 3, None])
def test_what_is_no_action_is_refused_with_its_place(tmp_path: Path, text: object) -> None:
    path = edited(tmp_path, lambda plan: plan["pipelines"][0].update(orders=[["0F0"], ["0F0", text]]))
    message = refusal(path)
    assert f": pipelines[0].orders[1][1]: {text!r} is not an action; write" in message


def edited(tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A file with a good plan of two stages, changed by ``edit``."""
    data = json.loads(plan_json(chain_plan(chain_scenario([1.0, 1.0], [1.0, 1.0]))))
    edit(data)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data, indent=1))
    return path


def line_of(path: Path, text: str, occurrence: int = 0) -> int:
    return [number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line][occurrence]


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_plan(path)
    return str(caught.value)


def test_an_unknown_key_is_answered_with_its_line_and_the_closest(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda plan: plan["pipelines"][0]["stages"][1].update(in_flihgt=3))
    assert refusal(path) == (
        f"{path}:{line_of(path, 'in_flihgt')}: pipelines[0].stages[1].in_flihgt: unknown key 'in_flihgt'; "
        "did you mean 'in_flight'? valid: first_layer, end_layer, replicas, in_flight, recompute"
    )


@pytest.mark.parametrize(
    ("edit", "where", "valid"),
    [
        (lambda plan: plan.update(schedul="1f1b"), "schedul", "did you mean 'schedule'?"),
        (lambda plan: plan["pipelines"][0].update(stage=1), "pipelines[0].stage", "did you mean 'stages'?"),
        (
            lambda plan: plan["pipelines"][0]["stages"][0]["replicas"][0].update(devcie="a"),
            "pipelines[0].stages[0].replicas[0].devcie",
            "did you mean 'device'? valid: device, share, partners",
        ),
        (
            lambda plan: plan.update(synchronisation={"methd": "ma"}),
            "synchronisation.methd",
            "did you mean 'method'? valid: method, algorithm, interval_steps, staleness_bound",
        ),
    ],
)
def test_unknown_keys_at_every_level(tmp_path: Path, edit: Callable[[Any], object], where: str, valid: str) -> None:
    path = edited(tmp_path, edit)
    message = refusal(path)
    assert message.startswith(f"{path}:")
    assert f": {where}: unknown key '{where.rpartition('.')[2]}'; {valid}" in message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda plan: plan["pipelines"][0]["stages"][1].pop("end_layer"))
    message = refusal(path)
    assert "pipelines[0].stages[1].end_layer: the key 'end_layer' is missing; add 'end_layer:' there" in message


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, "1", None, 1.5])
def test_another_version_is_refused(tmp_path: Path, version: object) -> None:
    path = edited(tmp_path, lambda plan: plan.update(version=version))
    assert refusal(path) == (
        f"{path}:2: version: the plan has version {version!r}; "
        f"this ropebridge reads version {SCHEMA_VERSION}: make the plan again"
    )


@pytest.mark.parametrize("content", ["[]", "{}", '"plan"', "3", "null", '{"pipelines": []}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    assert refusal(path) == f"{path}: this is not a plan; make one with 'ropebridge plan'"


def test_what_is_not_json_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{\n "version": 1,\n "scenario" "chain"\n}')
    assert refusal(path).startswith(f"{path}:3: the file is not JSON: Expecting ':' delimiter")


@pytest.mark.parametrize("content", [b"", b" \n", b"\x80\x02}q\x00.", b'{"version": 1\x00}'])
def test_an_empty_or_binary_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}: ")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.json") == f"{tmp_path / 'none.json'}: there is no such file; check the path"
    assert refusal(tmp_path) == f"{tmp_path}: this is a folder; name a file"


@pytest.mark.parametrize("value", ["3", 2.5, None, True, [1]])
def test_a_value_of_another_type_is_refused_with_its_line(tmp_path: Path, value: object) -> None:
    path = edited(tmp_path, lambda plan: plan["pipelines"][0]["stages"][1].update(in_flight=value))
    message = refusal(path)
    line = line_of(path, '"in_flight"', 1)
    wrong = "there is no value" if value is None else f"{value!r} is not valid"
    assert message.startswith(f"{path}:{line}: pipelines[0].stages[1].in_flight: {wrong}; input should")


def test_a_wrong_microbatch_is_named_by_its_index(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda plan: plan["pipelines"][0].update(microbatches=[4, "4"]))
    assert "pipelines[0].microbatches[1]: '4' is not valid; input should be a valid integer" in refusal(path)


def test_a_file_indented_with_tabs_is_refused_like_any_other(tmp_path: Path) -> None:
    # As `jq --tab` writes it: JSON, though not YAML.
    path = edited(tmp_path, lambda plan: plan.update(schedule=3))
    path.write_text(json.dumps(json.loads(path.read_text()), indent="\t"))
    assert "schedule: 3 is not valid; input should be a valid string" in refusal(path)


def test_the_schema_names_every_key() -> None:
    schema = plan_schema()
    assert set(schema["properties"]) == {
        "scenario",
        "model",
        "strategy",
        "schedule",
        "pipelines",
        "order",
        "synchronisation",
        "connections",
        "compression",
        "noise_scale",
        "version",
    }
    stage = {"first_layer", "end_layer", "replicas", "in_flight", "recompute"}
    assert set(schema["$defs"]["Stage"]["properties"]) == stage
    assert set(schema["$defs"]["Replica"]["properties"]) == {"device", "share", "partners"}
    action = schema["$defs"]["Pipeline"]["properties"]["orders"]["items"]["items"]
    assert (action["type"], action["pattern"]) == ("string", r"^\d+[FBIW]\d+$")
    assert schema["additionalProperties"] is False
