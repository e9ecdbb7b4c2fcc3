"""The verb `ropebridge sweep`."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.cli.options import JsonOption
from experiments.runs.console import say, tell


def sweep(
    path: Annotated[Path, typer.Argument(metavar="SWEEP", help="A YAML file: a scenario, and what differs.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for the table; one that is there goes on. (sweeps/NAME)"),
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="What carries out points: local, slurm, dask.")] = "local",
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Points at a time.", show_default="this machine's cores")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Carry out points again that have failed before.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate over grids, lists or draws of parameters into one table. Example: ropebridge sweep links.yaml -j 2."""
    from experiments.verbs.sweep import sweep as verb

    say(verb(path, output, engine, jobs, as_json, retry_failed, tell))
