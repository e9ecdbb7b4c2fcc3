"""What only the simulator can do is refused before a process starts, through the real command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from builders import chain_plan, chain_scenario
from command import ropebridge

from executor.support import check_supported
from planner.actions import parse_action
from planner.faults import Absence
from planner.files.plan_file import write_plan
from planner.files.scenario_json import write_resolved_scenario
from planner.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario import Scenario
from traces.errors import InputError

SCENARIO = chain_scenario([1e-3, 1e-3], [1e-3, 1e-3], global_batch=2)
PLAN = chain_plan(SCENARIO)


def explicit(*orders: str) -> Plan:
    rows = tuple(tuple(parse_action(text) for text in order.split()) for order in orders)
    pipeline = replace(PLAN.pipelines[0], orders=rows)
    return replace(PLAN, schedule="explicit", pipelines=(pipeline,))


def on_one_device() -> Plan:
    stages = tuple(Stage(n, n + 1, (Replica("device-0"),), 1) for n in range(2))
    orders = tuple(parse_action(text) for text in ["0F0", "1F0", "1B0", "0B0"])
    return replace(PLAN, schedule="explicit", pipelines=(Pipeline(stages, (2,), (orders,)),))


def two_pipelines(how: Synchronisation) -> Plan:
    pipelines = tuple(Pipeline((Stage(0, 2, (Replica(f"device-{n}"),), 1),), (1,)) for n in range(2))
    return replace(PLAN, pipelines=pipelines, synchronisation=how)


WITH_FAULTS = replace(SCENARIO, faults=(Absence("device-0", 1.0, 2.0),))

REFUSED: dict[str, tuple[Plan, Scenario, str, str]] = {
    "split backward": (
        explicit("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1 1W0"),
        SCENARIO,
        "pipelines[0].orders: action 1I0, a part of a backward",
        "explicit orders of F and B",
    ),
    "several stages": (on_one_device(), SCENARIO, "pipelines[0].stages: several stages on one device", "its own"),
    "dynamic order": (replace(PLAN, order="dynamic"), SCENARIO, "order: order 'dynamic'", "run with 'scheduled'"),
    "no waiting": (
        two_pipelines(Synchronisation("ma", every=4)),
        SCENARIO,
        "synchronisation.method: method 'ma'",
        "run with 'allreduce'",
    ),
    "connections": (
        replace(PLAN, connections=4),
        SCENARIO,
        "connections: 4 connections between two devices",
        "run with 1",
    ),
    "faults": (PLAN, WITH_FAULTS, "faults: faults that a scenario foresees", "remove them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    plan, scenario, problem, valid = REFUSED[case]
    write_resolved_scenario(scenario, tmp_path / "scenario.json")
    write_plan(plan, tmp_path / "plan.json")
    arguments = ["run", "scenario.json", "--plan", "plan.json", "--compute", "paced", "-o", "out"]
    done = ropebridge(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert f"{problem} cannot be run yet; " in done.stderr
    assert valid in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("schedule", ["zb-h1", "portfolio"])
def test_a_schedule_that_splits_backward_is_refused(schedule: str) -> None:
    with pytest.raises(InputError, match=f"schedule '{schedule}' cannot be run yet; run with one of gpipe, 1f1b"):
        check_supported(replace(PLAN, schedule=schedule), SCENARIO)


def test_tensor_parallelism_is_refused() -> None:
    group = (Stage(0, 2, (Replica("device-0", 1.0, ("device-1",)),), 1),)
    with pytest.raises(InputError, match=r"replicas\[0\].partners: tensor parallelism cannot be run yet"):
        check_supported(replace(PLAN, pipelines=(Pipeline(group, (2,)),)), SCENARIO)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PLAN,
        lambda: replace(PLAN, schedule="gpipe"),
        lambda: explicit("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"),
        lambda: two_pipelines(Synchronisation(algorithm="tree")),
    ],
)
def test_what_can_be_run(make: Callable[[], Plan]) -> None:
    check_supported(make(), SCENARIO)


def test_a_plan_file_of_before_can_be_run(tmp_path: Path) -> None:
    # As written before partners, orders and synchronisation existed.
    stages = [
        {
            "first_layer": n,
            "end_layer": n + 1,
            "replicas": [{"device": f"device-{n}", "share": 1.0}],
            "in_flight": 2 - n,
        }
        for n in range(2)
    ]
    plan = {
        "version": 1,
        "scenario": "chain",
        "model": "chain",
        "strategy": "hand",
        "schedule": "1f1b",
        "pipelines": [{"stages": stages, "microbatches": [1, 1]}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    write_resolved_scenario(SCENARIO, tmp_path / "scenario.json")
    done = ropebridge("run", "scenario.json", "--plan", "plan.json", "--compute", "paced", "--steps", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
