"""The verbs that run for real: `run` on this machine; `deploy`, `host`, `status`, `logs` and `stop` on others."""

import os
from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.options import (
    MOST,
    TARGETS,
    AllowNanOption,
    BackupOption,
    CheckpointEveryOption,
    ComputeChoice,
    ComputeOption,
    DynamicOption,
    EmulatorOption,
    FolderOption,
    JsonOption,
    OnThisDeviceOption,
    OrdersOption,
    PlanOption,
    PolicyOption,
    ResumeOption,
    ScenarioArgument,
    ScheduleOption,
    StepsOption,
    StrategyOption,
    one_of,
)
from experiments.runs.console import say, tell, tell_of_compiling

DeploymentArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that 'ropebridge deploy' wrote.")]


def run(
    scenario: ScenarioArgument,
    plan: PlanOption = None,
    strategy: StrategyOption = None,
    schedule: ScheduleOption = None,
    dynamic: DynamicOption = False,
    orders: OrdersOption = None,
    policy: PolicyOption = "none",
    compute: ComputeOption = ComputeChoice.REAL,
    emulate_wan: Annotated[
        bool, typer.Option("--emulate-wan", help="Emulate the links and their traces on this machine.")
    ] = False,
    emulator: Annotated[
        EmulatorOption | None,
        typer.Option(
            help="Emulate links with: relay (below TCP), shaper (holds messages back), auto (relay if it can).",
        ),
    ] = None,
    on_this_device: OnThisDeviceOption = False,
    allow_nan: AllowNanOption = False,
    backup_every: BackupOption = 0,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Folder for checkpoints.")] = None,
    checkpoint_every: CheckpointEveryOption = None,
    resume: ResumeOption = False,
    live: Annotated[bool, typer.Option("--live", help="Show the run in the terminal while it goes on.")] = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard, written during the run.")] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="ADDRESS:PORT", help="Serve metrics for Prometheus here.")
    ] = None,
    steps: StepsOption = 20,
    output: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a plan for real, a process per device. Example: ropebridge run digits --strategy ddp --emulate-wan."""
    from executor.core.job import EmulatorChoice
    from experiments.runs.carry_out import carry_out_or_resume, present
    from experiments.runs.progress import showing_run
    from experiments.runs.scenario import Ordering, choose_plan, choose_scenario
    from experiments.verbs.run import checkpoint_config, real_backend, resumed_plan

    tell_of_compiling()
    described, ordering = choose_scenario(scenario), Ordering(schedule, dynamic, orders)
    checkpoints, resumed = checkpoint_config(
        checkpoint, checkpoint_every, resume, described, steps, compute.value, tell
    )
    chosen: EmulatorChoice = "auto" if emulate_wan else "none"
    if emulator is not None:
        chosen = emulator.value
    if resumed is not None and plan is None and strategy is None:
        planned = resumed_plan(resumed, described, ordering)
    else:
        planned = choose_plan(described, plan, strategy, ordering)
    with showing_run(live=live, tensorboard=tensorboard, prometheus=prometheus, tell=tell) as watch:
        backend = real_backend(
            compute.value,
            emulator=chosen,
            on_this_device=on_this_device,
            allow_nan=allow_nan,
            backup_every=backup_every,
            checkpoints=checkpoints,
            watch=watch,
            tell=tell,
        )
        record = carry_out_or_resume(described, planned, policy, steps, output, backend, checkpoints, tell)
    say(present(record, as_json))


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with real compute.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints: export the newest one, not the end of the run.")
    ] = None,
) -> None:
    """Write a trained model for transformers' from_pretrained. Example: ropebridge export runs/1 -o my-llama."""
    from experiments.verbs.run import export as verb

    say(verb(folder, checkpoint, output))


def deploy(
    scenario: ScenarioArgument,
    target: Annotated[
        str, typer.Option(help=f"Target of the deployment: {', '.join(TARGETS)}.", autocompletion=one_of(TARGETS))
    ],
    hosts: Annotated[Path, typer.Option(help="A YAML file that describes the hosts.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder, whose name is the job's.")],
    plan: PlanOption = None,
    strategy: StrategyOption = None,
    policy: PolicyOption = "none",
    compute: ComputeOption = ComputeChoice.REAL,
    on_this_device: OnThisDeviceOption = False,
    allow_nan: AllowNanOption = False,
    steps: StepsOption = 20,
    backup_every: BackupOption = 0,
    checkpoint: Annotated[str, typer.Option(help="Folder for checkpoints, which all hosts share.")] = "",
    checkpoint_every: CheckpointEveryOption = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job, not only show commands.")] = False,
) -> None:
    """Make a job for many hosts. Example: ropebridge deploy my.yaml --plan p --target ssh --hosts h.yaml -o job-1."""
    from executor.deploy.bundle import HostedRun
    from experiments.runs.scenario import choose_plan, choose_scenario
    from experiments.verbs.hosts import deploy as verb
    from experiments.verbs.run import CHECKPOINT_EVERY

    chosen = choose_scenario(scenario)
    every = (checkpoint_every or CHECKPOINT_EVERY) if checkpoint else 0
    config = HostedRun(compute.value, steps, policy, backup_every, checkpoint, every, on_this_device, allow_nan)
    say(verb(chosen, choose_plan(chosen, plan, strategy), config, target, hosts, output, submit))


def host(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job's folder on this host.")],
    name: Annotated[str, typer.Argument(metavar="HOST", help="Name of this host in the scenario.")],
    head: Annotated[str | None, typer.Option("--head", help="Address of the head, if it is not in the job.")] = None,
    resume: ResumeOption = False,
) -> None:
    """Run one host's part of a job that was deployed. Example: ropebridge host job-1/job cloud-1."""
    # Read when numpy is loaded: the ranks, which are forked from this process, share its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from experiments.verbs.hosts import host as verb

    say(verb(job, name, head or None, resume, tell))


def status(folder: DeploymentArgument) -> None:
    """Show the state of each host of a deployed job. Example: ropebridge status job-1."""
    from experiments.verbs.hosts import status as verb

    say(verb(folder))


def logs(
    folder: DeploymentArgument,
    name: Annotated[
        str | None, typer.Option("--host", help="Host whose output to show.", show_default="the head's")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=MOST, help="Number of last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines.")] = False,
) -> None:
    """Show what a host of a deployed job has printed. Example: ropebridge logs job-1 --host edge-1 -f."""
    from experiments.verbs.hosts import logs as verb

    if verb(folder, name, lines, follow):
        raise typer.Exit(1)


def stop(folder: DeploymentArgument) -> None:
    """End a deployed job on all its hosts. Example: ropebridge stop job-1."""
    from experiments.verbs.hosts import stop as verb

    say(verb(folder))
