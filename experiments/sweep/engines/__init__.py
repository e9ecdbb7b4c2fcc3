"""The engines that carry out the points of a sweep, by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.sweep.engines.dask import DaskTasks
from experiments.sweep.engines.local import LocalProcesses
from experiments.sweep.engines.slurm import SlurmJobs
from experiments.sweep.worker import Engine
from traces.common.errors import find_by_name

# Functions that take the number of points at a time, the sweep's folder and the settings of Slurm's jobs.
ENGINES: Mapping[str, Callable[[int, Path, Mapping[str, Any]], Engine]] = {
    "local": lambda jobs, _folder, _settings: LocalProcesses(jobs),
    "slurm": SlurmJobs,
    "dask": lambda jobs, _folder, _settings: DaskTasks(jobs),
}


def make_engine(name: str, jobs: int, folder: Path, settings: Mapping[str, Any]) -> Engine:
    """Return the engine with a name, which carries out ``jobs`` points at a time.

    Raises:
        InputError: There is no such engine, or a package that it needs is not installed.
    """
    return find_by_name(name, ENGINES, "engine", where="--engine")(jobs, folder, settings)
