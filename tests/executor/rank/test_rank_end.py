"""A rank that has nothing left to do waits for the others, however long they work.

Ranks run this as ``python -m test_rank_end AGENT_PID FOLDER``, with little patience.
"""

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from executor.control.launcher import run_job
from executor.core.clock import create_origin
from executor.core.job import JobFolder, RunConfig
from executor.rank import rank, worker
from executor.rank.resources import read_samples
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.profile import ModelProfile
from tests.helpers.scenarios.builders import mesh_scenario

PATIENCE_S = 4.0
STEPS = 4


@pytest.mark.slow
def test_a_partner_waits_for_its_group_longer_than_for_any_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    scenario = mesh_scenario(2, [0.6], [1.2], global_batch=1)
    model = replace(scenario.model, sharded={2: ModelProfile("half", scenario.model.layers)})
    devices = tuple(replace(device, host="one") for device in scenario.cluster.devices)
    scenario = replace(scenario, model=model, cluster=replace(scenario.cluster, devices=devices))
    leader, partner = names = [device.name for device in devices]
    stage = Stage(0, 1, (Replica(leader, partners=(partner,)),), 1)
    plan = Plan(scenario.name, scenario.model.name, "hand", "1f1b", (Pipeline((stage,), (1,)),))
    job = JobFolder(tmp_path)
    job.write(scenario, plan, RunConfig("paced", STEPS, "none", adapts=False))
    create_origin(job.origin)
    run_job(job, names, module="test_rank_end")
    led, followed = (read_samples(job.resources(rank))[-1].time_s for rank in range(2))
    assert led - followed > PATIENCE_S


if __name__ == "__main__":
    rank.PATIENCE = timedelta(seconds=PATIENCE_S)
    worker.main(*sys.argv[1:])
