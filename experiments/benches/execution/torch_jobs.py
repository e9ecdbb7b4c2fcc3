"""Runs torch.distributed.pipelining as a job of the executor's launcher: on the same emulated links."""

import json
from dataclasses import asdict

from executor.control.launcher import prepared_job, run_job
from executor.core.job import Emulator, RunConfig, Tcp
from experiments.benches.execution.torch_pipelining import Measured, PipeliningRun
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario


def run_torch_pipelining(
    run: PipeliningRun, scenario: Scenario, plan: Plan, emulator: Emulator, tcp: Tcp
) -> list[Measured]:
    """Return what each rank measured.

    Args:
        run: What torch runs.
        scenario: Gives the links.
        plan: Gives the devices; torch makes its own schedule.
        emulator: ``none`` or ``relay``.
        tcp: How the relay's hosts are set.
    """
    with prepared_job(scenario, plan, RunConfig(run.compute, run.steps, emulator, adapts=False, tcp=tcp)) as job:
        (job.path / "parameters.json").write_text(json.dumps(asdict(run)))
        run_job(job, plan.devices, module="experiments.benches.execution.torch_pipelining")
        ranks = range(len(plan.devices))
        return [Measured(**json.loads((job.path / f"rank-{rank}.json").read_text())) for rank in ranks]
