"""The verbs that bring jobs to hosts: `deploy`, `host`, `status`, `logs`, `stop`."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.options import ComputeChoice, PlanOption, PolicyOption, ScenarioArgument, StrategyOption
from experiments.runs.console import say, tell

DeploymentArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that 'ropebridge deploy' wrote.")]


def deploy(
    scenario: ScenarioArgument,
    target: Annotated[
        str, typer.Option("--target", help="What brings it there: torchrun, ssh, slurm, kubernetes, skypilot.")
    ],
    hosts: Annotated[Path, typer.Option("--hosts", help="A YAML file that describes the hosts.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder, named as the job shall be.")],
    plan: PlanOption = None,
    strategy: StrategyOption = None,
    policy: PolicyOption = "none",
    compute: Annotated[
        ComputeChoice, typer.Option("--compute", help="Train the model, or move its bytes at the profile's pace.")
    ] = ComputeChoice.REAL,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps.")] = 20,
    backup_every: Annotated[
        int, typer.Option("--backup-every", min=0, help="Copy the state so often, in steps, and outlive lost hosts.")
    ] = 0,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Folder that all hosts see, to write the training state into.")
    ] = "",
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", min=1, help="Steps from one checkpoint to the next.")
    ] = 10,
    submit: Annotated[bool, typer.Option("--submit", help="Start it, instead of only showing what would.")] = False,
) -> None:
    """Bring a plan to its hosts. Example: ropebridge deploy my.yaml --plan p --target ssh --hosts h.yaml -o job-1."""
    from executor.deploy.deployment import HostedRun
    from experiments.runs.scenario import choose_plan, choose_scenario
    from experiments.verbs.hosts import DeployConfig
    from experiments.verbs.hosts import deploy as verb

    chosen = choose_scenario(scenario)
    run = HostedRun(compute.value, steps, policy, backup_every, checkpoint, checkpoint_every if checkpoint else 0)
    say(verb(chosen, choose_plan(chosen, plan, strategy), DeployConfig(target, hosts, run), output, submit))


def host(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job's folder on this host.")],
    name: Annotated[str, typer.Argument(metavar="HOST", help="This host, as the scenario names it.")],
    head: Annotated[str | None, typer.Option("--head", help="Address of the head, if it was not known before.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint; said on the head.")
    ] = False,
) -> None:
    """Run one host's part of a job that was deployed. Example: ropebridge host job-1/job cloud-1."""
    from experiments.verbs.hosts import host as verb

    say(verb(job, name, head or None, resume, tell))


def status(folder: DeploymentArgument) -> None:
    """Say how a deployed job stands on each host. Example: ropebridge status job-1."""
    from experiments.verbs.hosts import status as verb

    say(verb(folder))


def logs(
    folder: DeploymentArgument,
    name: Annotated[str | None, typer.Option("--host", help="Whose; the head's if absent.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="At the end.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
) -> None:
    """Show what a host of a deployed job has printed. Example: ropebridge logs job-1 --host edge-1 -f."""
    from experiments.verbs.hosts import logs as verb

    if status_ := verb(folder, name, lines, follow):
        raise typer.Exit(1 if status_ else 0)


def stop(folder: DeploymentArgument) -> None:
    """End a deployed job on all its hosts. Example: ropebridge stop job-1."""
    from experiments.verbs.hosts import stop as verb

    say(verb(folder))


def add_to(app: typer.Typer) -> None:
    """Give these verbs to the command."""
    for verb in (deploy, host, status, logs, stop):
        app.command()(verb)
