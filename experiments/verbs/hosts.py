"""The verbs for jobs on other machines: ``ropebridge deploy``, ``host``, ``status``, ``logs`` and ``stop``."""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from executor.backend import TorchBackend
from executor.control.node_agent import run_member
from executor.core.hosts import Hosts
from executor.core.job import CheckpointConfig
from executor.core.timeouts import timeouts
from executor.deploy.bundle import HostedRun
from executor.deploy.deployment import Bundle, Deployment, read_bundle, read_deployment
from executor.deploy.gpus import gpus_of
from executor.deploy.hosts_file import hosts_of, read_hosts_file
from executor.deploy.target import Target, exports, find_target
from executor.validate import check_spread, check_supported
from experiments.runs.carry_out import carry_out_or_resume, present
from experiments.runs.folder import new_folder
from experiments.runs.progress import run_lines
from experiments.runs.scenario import Ordering
from experiments.verbs.run import checkpoint_config, resumed_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_policy
from traces.common.atomic import write_private_text
from traces.common.errors import InputError, find_by_name

Part = TypeVar("Part")

# Names that Slurm, Kubernetes and clouds accept.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


def deploy(
    scenario: Scenario, plan: Plan, run: HostedRun, target_name: str, hosts_path: Path, output: Path, submits: bool
) -> str:
    """Write the files of a job into a new folder, and submit the job if ``submits``; return what to print.

    The target is the system that starts the job, such as ``ssh`` or ``slurm``. The job gets the name of the folder.

    Raises:
        InputError: The job cannot run on these hosts, or the target lacks something.
        RunError: The submission failed; the folder is kept for inspection.
    """
    target = find_target(target_name)
    name = output.resolve().name
    if not _NAME.fullmatch(name):
        raise InputError(
            f"'{name}' is no name for a job",
            where="--output",
            valid="name the folder with 1 to 40 small letters, digits and dashes, such as 'job-1'",
        )
    if submits and target.submit is None:
        raise InputError(
            f"the target '{target.name}' cannot submit jobs", where="--submit", valid="leave it out, or choose 'ssh'"
        )
    described = read_hosts_file(hosts_path)
    devices = _rank_devices(scenario, plan, run)
    hosts = hosts_of(described, scenario.cluster, devices, str(hosts_path))
    if not hosts.address and target_name in ("ssh", "torchrun"):
        raise InputError(
            f"the head '{hosts.head}' has no address",
            where=f"{hosts_path}: hosts.{hosts.head}.address",
            valid="give the address at which the other hosts reach the head",
        )
    deployment = Deployment(
        name,
        target_name,
        hosts,
        {part.name: described.hosts[part.name] for part in hosts.parts},
        dict(described.environment),
        described.secrets,
        described.ssh_options,
        described.setup,
        gpus_of(described, scenario.cluster, devices, run.compute, str(hosts_path)),
    )
    files = target.files(deployment)
    with new_folder(output) as folder:
        # Scripts and scheduler's files contain the job's environment too.
        folder.chmod(0o700)
        Bundle(scenario, plan, run, hosts).write(folder / "job")
        write_private_text(folder / "job" / "environment.sh", exports(deployment.environment))
        deployment.write(folder)
        for file, text in files.items():
            write_private_text(folder / file, text)
    lines = [f"# {output / file}\n{text}" for file, text in files.items()]
    if not submits:
        advice = "next: carry this out"
        if target.submit is not None:
            advice += ", or give '--submit' and another folder, after which 'ropebridge status' knows the job"
        return "\n".join([*lines, advice])
    assert target.submit is not None
    try:
        submitted = target.submit(deployment, output)
    except InputError:
        # A program or a secret is missing, and nothing has been submitted: the corrected command takes the same folder.
        shutil.rmtree(output, ignore_errors=True)
        raise
    return "\n".join([submitted, f"next: ropebridge status {output}"])


def _rank_devices(scenario: Scenario, plan: Plan, run: HostedRun) -> tuple[str, ...]:
    """Return the job's devices in rank order; raise InputError if the job cannot run on several hosts."""
    policy = make_policy(run.policy, scenario)
    recovers = run.backup_every > 0
    check_spread(scenario, "none")
    check_supported(plan, scenario, run.compute, "none", recovers=recovers, checkpoints=bool(run.checkpoint))
    return run.devices(scenario, plan, adapts=policy is not None)


def status(folder: Path) -> str:
    """Return the state of a deployed job as text, one line per host."""
    deployment, target = _submitted(folder)
    found = _able(target.status, target)(deployment, folder)
    width = max(map(len, found))
    return "\n".join(f"{host:{width}}  {state}" for host, state in found.items())


def logs(folder: Path, host: str | None, lines: int, follows: bool) -> int:
    """Show the last ``lines`` lines that a host, by default the head, has printed; return the exit status.

    With ``follows`` new lines are shown too. The exit status is that of the program that reads the output.
    """
    deployment, target = _submitted(folder)
    chosen = host or deployment.hosts.head
    find_by_name(chosen, deployment.entries, "host", where="--host")
    command = _able(target.logs, target)(deployment, folder, chosen, lines, follows)
    if shutil.which(command[0]) is None:
        raise InputError(f"there is no program '{command[0]}' on this machine", valid="install it")
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def stop(folder: Path) -> str:
    """End the job on all hosts; return what to print."""
    deployment, target = _submitted(folder)
    return _able(target.stop, target)(deployment, folder)


def _submitted(folder: Path) -> tuple[Deployment, Target]:
    deployment = read_deployment(folder)
    return deployment, find_target(deployment.target)


def _able(part: Part | None, target: Target) -> Part:
    if part is None:
        raise InputError(
            f"the target '{target.name}' does not manage processes", valid="log in to the hosts and use their own tools"
        )
    return part


def host(folder: Path, name: str, address: str | None, resume: bool, tell: Callable[[str], None]) -> str:
    """Run one host's part of a deployed job until the job ends; return what to print.

    Args:
        folder: The job's folder on this host.
        name: Name of this host.
        address: Address of the head, if the job does not contain it.
        resume: Whether to go on from the newest checkpoint; only the head uses this.
        tell: Called with lines about the progress.

    Raises:
        InputError: The folder holds no job, the job has no such host, or ``ROPEBRIDGE_TIMEOUTS`` is wrong.
        RunError: The run failed.
    """
    timeouts()
    bundle = read_bundle(folder)
    parts = {part.name: part for part in bundle.hosts.parts}
    find_by_name(name, parts, "host", where=str(folder / "hosts.json"))
    hosts = replace(bundle.hosts, address=address or bundle.hosts.address)
    if not hosts.address:
        raise InputError("the address of the head is unknown", where="--head", valid="give it, such as 10.7.0.1")
    if name == hosts.head:
        return _lead(bundle, hosts, folder / "run", resume, tell)
    tell(f"host {name}: ranks {', '.join(map(str, parts[name].ranks))}, head at {hosts.address}:{hosts.port}")
    run_member(hosts, name, bundle.code, bundle.checkpoints, bundle.data)
    return f"host {name} has done its part"


def _lead(bundle: Bundle, hosts: Hosts, output: Path, resume: bool, tell: Callable[[str], None]) -> str:
    run, scenario, plan = bundle.run, bundle.scenario, bundle.plan
    folder = Path(run.checkpoint) if run.checkpoint else None
    if resume and folder is None:
        raise InputError("this job writes no checkpoints", where="--resume", valid="deploy it with '--checkpoint'")
    checkpoints: CheckpointConfig | None
    checkpoints, had = checkpoint_config(
        folder, run.checkpoint_every or None, resume, scenario, run.steps, run.compute, tell
    )
    if had is not None:
        plan = resumed_plan(had, scenario, Ordering())

    def backend(place: Path | None) -> TorchBackend:
        return TorchBackend(
            run.compute,
            parameters=place / "parameters.safetensors" if place is not None else None,
            resources=place,
            backup_every=run.backup_every,
            checkpoints=checkpoints,
            hosts=hosts,
            on_this_device=run.on_this_device,
            allow_nan=run.allow_nan,
            watch=run_lines(tell),
            tell=tell,
        )

    record = carry_out_or_resume(scenario, plan, run.policy, run.steps, output, backend, checkpoints, tell)
    return present(record, as_json=False)
