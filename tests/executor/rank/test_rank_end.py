"""A rank that has nothing left to do waits for the others, however long they work."""

import json
from dataclasses import replace

import pytest

from executor.control.launcher import prepared_job, run_job
from executor.core.job import RunConfig
from executor.rank.telemetry import read_samples
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.profile import ModelProfile
from tests.helpers.scenarios.builders import mesh_scenario

PATIENCE_S = 4.0
STEPS = 4


@pytest.mark.slow
def test_a_partner_waits_for_its_group_longer_than_for_any_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROPEBRIDGE_TIMEOUTS", json.dumps({"recv_s": PATIENCE_S}))
    scenario = mesh_scenario(2, [0.6], [1.2], global_batch=1)
    model = replace(scenario.model, sharded={2: ModelProfile("half", scenario.model.layers)})
    devices = tuple(replace(device, host="one") for device in scenario.cluster.devices)
    scenario = replace(scenario, model=model, cluster=replace(scenario.cluster, devices=devices))
    leader, partner = names = [device.name for device in devices]
    stage = Stage(0, 1, (Replica(leader, partners=(partner,)),), 1)
    plan = Plan(scenario.name, scenario.model.name, "hand", "1f1b", (Pipeline((stage,), (1,)),))
    with prepared_job(scenario, plan, RunConfig("paced", STEPS, "none", adapts=False)) as job:
        run_job(job, names)
        led, followed = (read_samples(job.of_rank("resources", rank))[-1].time_s for rank in range(2))
    assert led - followed > PATIENCE_S
