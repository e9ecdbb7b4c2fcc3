"""Many jobs, one after the other in the same processes: starting those takes seconds.

`main` is what each rank runs, by the list of jobs in the folder.
Each job is carried out as the executor does it, from the handshake to the end of its process groups.
"""

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from executor.control.launcher import run_job
from executor.core.clock import create_origin
from executor.core.control_channel import new_key, write_key
from executor.core.failures import give_up, read_failure
from executor.core.job import JobFolder, RunConfig
from executor.rank.worker import join_job, run_rank
from executor.validate import check_supported
from planner.check import check_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from tests.helpers.processes.training import Trained
from traces.common.errors import InputError, RunError

# A job takes about a second: whoever takes longer than this waits for ever.
LIMIT_S = 120.0

_JOBS = "jobs.json"

Outcome = Trained | Exception


def train_one_by_one(runs: Mapping[str, tuple[Scenario, Plan]], steps: int) -> dict[str, Outcome]:
    """Train by each plan; return what each run left or why it failed."""
    # Those of most ranks first: the last ranks end when there is nothing left for them, and nobody waits in between.
    order = sorted(runs, key=lambda name: -len(runs[name][1].devices))
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="many-jobs-") as folder:
        jobs = {name: _written(run, steps, Path(folder) / f"job-{n}") for n, (name, run) in enumerate(runs.items())}
        while left := [name for name in order if name not in outcomes]:
            error = _start([jobs[name] for name in left], Path(folder) / f"start-{len(outcomes)}")
            for name in left:
                ranks = len(runs[name][1].devices)
                if not _finished(jobs[name], ranks):
                    # The others come after it: they get processes of their own.
                    outcomes[name] = _failure(jobs[name], ranks, error)
                    break
                outcomes[name] = _outcome(jobs[name], ranks)
    return outcomes


def _written(run: tuple[Scenario, Plan], steps: int, folder: Path) -> JobFolder:
    scenario, plan = run
    check_plan(plan, scenario)
    check_supported(plan, scenario, "real", "none")
    folder.mkdir()
    job = JobFolder(folder)
    job.write(scenario, plan, RunConfig("real", steps, "none", adapts=False))
    create_origin(job.origin)
    return job


def _start(jobs: Sequence[JobFolder], folder: Path) -> Exception | None:
    """Carry out jobs in new processes until one fails; return why the processes ended, if not as they should."""
    folder.mkdir()
    # The launcher and its agent look at the first one, which has most ranks, to know what to start.
    scenario, plan, orders = jobs[0].read()
    started = JobFolder(folder)
    started.write(scenario, plan, orders)
    write_key(started.key, new_key())
    (folder / _JOBS).write_text(json.dumps([str(job.path) for job in jobs]))
    try:
        run_job(started, plan.devices, module="tests.helpers.processes.many_jobs")
    except (RunError, InputError) as error:
        return error
    return None


def _outcome(job: JobFolder, ranks: int) -> Outcome:
    losses = [
        part
        for rank in range(ranks)
        if (part := [loss for _, loss in map(json.loads, job.of_rank("losses", rank).read_text().splitlines())])
    ]
    parameters: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        for name, value in load_file(job.of_rank("parameters", rank)).items():
            if not torch.equal(parameters.setdefault(name, value), value):
                return AssertionError(f"replicas of {name} differ")
    return Trained([sum(step) for step in zip(*losses, strict=True)], parameters)


def _failure(job: JobFolder, ranks: int, ended: Exception | None) -> Exception:
    """Why a job was not finished: how the processes ended, caused by what a rank said."""
    failure = ended or RunError("not carried out")
    said = [words for rank in range(ranks) if (words := read_failure(job, rank)) is not None]
    if said:
        failure.__cause__ = min(said, key=lambda words: words.follows).to_error()
    return failure


def _mark(job: JobFolder, rank: int) -> Path:
    """There when a rank has written everything."""
    return job.path / f"finished-{rank}"


def _finished(job: JobFolder, ranks: int) -> bool:
    return all(_mark(job, rank).exists() for rank in range(ranks))


def main(agent: str, folder: str) -> None:
    """Carry out this process's rank of all jobs listed in ``folder``."""
    client = join_job(agent, folder)
    rank = client.rank
    for path in map(Path, json.loads((Path(folder) / _JOBS).read_text())):
        job = JobFolder(path)
        ranks = len(job.read()[1].devices)
        if rank >= ranks:
            break
        late = RunError(f"did not finish within {LIMIT_S:.0f} s")
        timer = threading.Timer(LIMIT_S, give_up, (job, rank, f"rank {rank}", late))
        timer.daemon = True
        timer.start()
        run_rank(client, job, ranks, scope=f"{path.name}/", head_start_s=0.0)
        timer.cancel()
        _mark(job, rank).touch()
