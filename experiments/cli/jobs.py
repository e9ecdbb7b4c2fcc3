"""The verbs of the control plane: `serve`, and `jobs ...` for users and hosts of the server."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.options import (
    MOST,
    AllowNanOption,
    BackupOption,
    CheckpointEveryOption,
    ComputeChoice,
    ComputeOption,
    JsonOption,
    OnThisDeviceOption,
    PlanOption,
    PolicyOption,
    ScenarioArgument,
    StepsOption,
    StrategyOption,
)
from experiments.runs.console import say, tell

if TYPE_CHECKING:
    from experiments.runs.jobs.client import Client

jobs_app = typer.Typer(help="Submit jobs to a server, watch them, and run them on hosts.", no_args_is_help=True)

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="Address of 'ropebridge serve'.",
        show_default="$ROPEBRIDGE_SERVER, or https://127.0.0.1:29500",
    ),
]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help="File with the server's token.", show_default="$ROPEBRIDGE_TOKEN, $ROPEBRIDGE_TOKEN_FILE"
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name of a job.")]


def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the jobs and of the token; made if new.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS[:PORT]", help="The one address to listen at.")
    ] = "127.0.0.1:29500",
    lease: Annotated[str, typer.Option(help="Time after which a silent host counts as lost, with its unit.")] = "30 s",
) -> None:
    """Keep a queue of jobs, and place them on hosts. Example: ropebridge serve queue --listen 10.7.0.1."""
    from experiments.runs.jobs.access import DEFAULT_PORT
    from experiments.runs.jobs.server import serve as verb
    from traces.common.errors import InputError
    from traces.common.units import parse_duration_s
    from traces.probe.conversation import parse_address

    lease_s = parse_duration_s(lease, "--lease")
    if not 0.5 <= lease_s <= 24 * 3600:
        raise InputError(f"{lease_s:g} s is not allowed", where="--lease", valid="give 500 ms to 24 h")
    address = parse_address(listen, DEFAULT_PORT)
    verb(folder, address.host, address.port, lease_s, tell)


@jobs_app.command("submit")
def submit(
    scenario: ScenarioArgument,
    plan: PlanOption = None,
    strategy: StrategyOption = None,
    policy: PolicyOption = "none",
    compute: ComputeOption = ComputeChoice.REAL,
    on_this_device: OnThisDeviceOption = False,
    allow_nan: AllowNanOption = False,
    steps: StepsOption = 20,
    backup_every: BackupOption = 0,
    checkpoint_every: CheckpointEveryOption = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the job.", show_default="the scenario's, and a number")
    ] = None,
    server: ServerOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a job to the queue. Example: ropebridge jobs submit digits --steps 40 --token-file queue/token."""
    from executor.deploy.bundle import HostedRun
    from experiments.runs.jobs.messages import check_name
    from experiments.runs.jobs.verbs import submit as verb
    from experiments.runs.scenario import choose_plan, choose_scenario
    from experiments.verbs.run import CHECKPOINT_EVERY

    if name is not None:
        check_name(name, "--name")
    client = _client(server, token_file)
    chosen = choose_scenario(scenario)
    every = checkpoint_every or CHECKPOINT_EVERY
    run = HostedRun(compute.value, steps, policy, backup_every, "", every, on_this_device, allow_nan)
    planned = choose_plan(chosen, plan, strategy)
    say(verb(client, chosen, planned, run, name, checkpoint_every, as_json, tell))


@jobs_app.command("status")
def status(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Name of a job.", show_default="all jobs and hosts")
    ] = None,
    server: ServerOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all jobs and hosts, or what has happened to one job. Example: ropebridge jobs status."""
    from experiments.runs.jobs.verbs import status as verb

    say(verb(_client(server, token_file), job, as_json))


@jobs_app.command("logs")
def logs(
    job: JobArgument,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, max=MOST, help="Number of the attempt.", show_default="the newest")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=MOST, help="Number of last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep showing new lines.")] = False,
    server: ServerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show what a job has printed. Example: ropebridge jobs logs digits-1 -f."""
    from experiments.runs.jobs.verbs import logs as verb

    verb(_client(server, token_file), job, attempt, lines, follow)


@jobs_app.command("stop")
def stop(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Names of jobs.")],
    server: ServerOption = None,
    token_file: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """End jobs, or take them out of the queue. Example: ropebridge jobs stop digits-1."""
    from experiments.runs.jobs.verbs import stop as verb

    say(verb(_client(server, token_file), jobs, as_json))


@jobs_app.command("work")
def work(
    name: Annotated[str, typer.Argument(metavar="HOST", help="Name of this host; each host has its own.")],
    shared: Annotated[
        Path, typer.Option("--shared", help="Folder that all hosts share, for checkpoints, losses and run folders.")
    ],
    devices: Annotated[
        list[str] | None,
        typer.Option("--device", metavar="KIND=NUMBER", help="What this host offers.", show_default="cpu=cores"),
    ] = None,
    server: ServerOption = None,
    token_file: TokenOption = None,
) -> None:
    """Run jobs of the queue on this host until Ctrl-C. Example: ropebridge jobs work host-1 --shared /data/jobs."""
    from experiments.runs.jobs.host import run_host
    from experiments.runs.jobs.messages import check_name
    from traces.common.errors import InputError
    from traces.common.text import key_and_value

    offered: dict[str, int] = {}
    for kind, number in (key_and_value(each, "cpu=4", "--device") for each in devices or [f"cpu={os.cpu_count()}"]):
        if not (kind and number.isascii() and number.isdigit() and int(number) > 0) or kind in offered:
            problem = f"'{kind}={number}' is no number of devices of another kind"
            raise InputError(problem, where="--device", valid="write a kind and a number above zero, such as h100=8")
        offered[kind] = int(number)
    run_host(_client(server, token_file), check_name(name, "HOST"), offered, shared, tell)


def _client(server: str | None, token_file: Path | None) -> "Client":
    from experiments.runs.jobs.access import find_access
    from experiments.runs.jobs.client import Client

    return Client(find_access(server, token_file))
