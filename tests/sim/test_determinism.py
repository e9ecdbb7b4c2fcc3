"""The same inputs and seed give the same events, byte for byte, whatever the process and its hash seed."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.benches.planning.random_clusters import random_cluster, renamed
from planner.check import check_plan
from planner.cost.device_speed import jitter_factors
from planner.events.event import EventKind
from planner.events.file import EventFile
from planner.plan.plan import Plan, Stage
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from traces.common.errors import InputError

TESTS = Path(__file__).parents[1]


def test_two_processes_with_other_hash_seeds_write_the_same_bytes(tmp_path: Path) -> None:
    files, said = [], []
    for seed in ("0", "12345"):
        folder = tmp_path / seed
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("swaying_run.py")), str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(TESTS.parent)},
            check=True,
            capture_output=True,
            text=True,
        )
        said.append(done.stdout)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1]
    assert said[0] == said[1]
    assert not said[0].startswith("adapting 0")
    # The runs are as unsteady as they are meant to be: everything that can happen happens in one of them.
    happened = {path.stem: {event.kind for event in EventFile(path)} for path in folder.iterdir()}
    assert happened.keys() == {"adapting", "fixed", "choosing", "updating", "moving", "copying"}
    assert set.union(*happened.values()) == set(EventKind)


def test_jitter_never_changes() -> None:
    # What a seed gives is part of what a scenario means.
    expected = [1.121816071827, 0.938094381470, 1.101311243338]
    assert jitter_factors(5, 3, 3, 0.2).tolist() == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("seed", [0, 2**53, 2**63, 2**64 - 2])
def test_neighbouring_seeds_and_steps_give_other_factors_however_large_they_are(seed: int) -> None:
    here, next_seed, next_step = (jitter_factors(*key, 50, 0.3) for key in ((seed, 1), (seed + 1, 1), (seed, 2)))
    assert not set(here) & set(next_seed)
    assert not set(here) & set(next_step)


@settings(max_examples=10)
@given(
    st.integers(0, 9999), st.sampled_from(["gpipe", "megatron", "cannikin"]), st.sampled_from(["dynamic", "scheduled"])
)
def test_names_change_nothing(seed: int, strategy: str, order: str) -> None:
    scenario = random_cluster(seed)
    assume(len(scenario.cluster.devices) <= 12 and scenario.effects.network.cold_start)
    other = renamed(scenario, seed)
    old, new = (each.cluster.devices for each in (scenario, other))
    names = {one.name: another.name for one, another in zip(old, new, strict=True)}
    try:
        plan = replace(make_plan(strategy, scenario), order=order)
        check_plan(plan, scenario)
    except InputError:
        assume(False)
    runs = [Simulator().run(scenario, plan, None, 2), Simulator().run(other, _with_names(plan, names), None, 2)]
    logs = [
        [(event.kind, rename[event.device], rename[event.peer], event.start_s, event.end_s) for event in run.events]
        for run, rename in zip(runs, ({**names, "": ""}, {name: name for name in ("", *names.values())}), strict=True)
    ]
    assert sorted(logs[0]) == sorted(logs[1])


def _with_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    def stage_of(stage: Stage) -> Stage:
        return replace(
            stage,
            replicas=tuple(
                replace(each, device=names[each.device], partners=tuple(names[other] for other in each.partners))
                for each in stage.replicas
            ),
        )

    pipelines = (replace(each, stages=tuple(map(stage_of, each.stages))) for each in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))
