"""The sweep engine for a Slurm cluster: job arrays through submitit, on nodes that share the sweep's folder."""

import importlib.util
import logging
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from experiments.sweep.engines.local import interrupts_held_back
from experiments.sweep.points import Point
from experiments.sweep.worker import Portion, Task, carry_out_points, one_thread_each
from traces.common.atomic import scratch_folder, write_text_atomically
from traces.common.errors import InputError

_FILE = "under-way"


def cancel_left(folder: Path) -> None:
    """Cancel the job arrays of a killed command, so that their points are not carried out twice."""
    path = folder / _FILE
    if path.is_file():
        # The exit status is not checked: Slurm forgets arrays that ended long ago.
        subprocess.run(["scancel", "--quiet", *path.read_text().split()], capture_output=True, check=False)
        path.unlink()


@contextmanager
def noted(folder: Path, job_ids: list[str]) -> Iterator[None]:
    """Record the arrays of submitit's job ids (``ARRAY_NUMBER``) in the folder while their jobs are under way."""
    arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
    write_text_atomically(folder / _FILE, "".join(f"{array}\n" for array in arrays))
    try:
        yield
    finally:
        (folder / _FILE).unlink(missing_ok=True)


# Portions of points for each job that runs at a time; with several, jobs end at about the same time.
_PORTIONS_PER_JOB = 4

# Most jobs of an array: Slurm's default of MaxArraySize is 1001.
_LARGEST_ARRAY = 1000

# Seconds between two checks for finished jobs; each check reads files.
_POLL_S = 1.0


class SlurmJobs:
    """Carries out points in jobs of Slurm.

    Args:
        jobs: Number of jobs that run at a time.
        folder: Folder for the inputs and outputs of jobs, which all nodes share.
        settings: Settings of the jobs, by submitit's names without the prefix ``slurm_``.
        cluster: Submitit's name of the executor; ``local`` is this machine.

    Raises:
        InputError: Submitit or Slurm is not installed, or a setting is unknown.
    """

    def __init__(self, jobs: int, folder: Path, settings: Mapping[str, Any], cluster: str = "slurm") -> None:
        if importlib.util.find_spec("submitit") is None:
            raise InputError(
                "submitit is not installed", where="--engine slurm", valid="pip install 'ropebridge[slurm]'"
            )
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise InputError(
                "this machine has no 'sbatch'", where="--engine slurm", valid="call it on a login node of the cluster"
            )
        _warn_on_stderr()
        self._jobs = jobs
        self._folder = folder
        self._settings = settings
        self._cluster = cluster
        # The settings are checked with another folder: submitit creates it at once, but nothing may change here yet.
        with scratch_folder() as scratch:
            self._executor(scratch)

    def carry_out(self, task: Task, points: Sequence[Point], *, alone: bool) -> Generator[Portion, None, None]:
        """Carry out all points; see `Engine.carry_out`."""
        if self._is_slurm:
            cancel_left(self._folder / "slurm")
        count = len(points) if alone else min(len(points), _PORTIONS_PER_JOB * self._jobs)
        portions = [points[len(points) * k // count : len(points) * (k + 1) // count] for k in range(count)]
        for first in range(0, count, _LARGEST_ARRAY):
            yield from self._array(task, portions[first : first + _LARGEST_ARRAY])

    def _array(self, task: Task, portions: Sequence[Sequence[Point]]) -> Iterator[Portion]:
        from submitit.core.utils import FailedJobError, UncompletedJobError
        from submitit.helpers import as_completed

        folder = self._folder.resolve() / "slurm"
        executor = self._executor(folder)
        with ExitStack() as stack:
            # Signals are deferred, since jobs that are submitted but not recorded would not be cancelled.
            with one_thread_each(), interrupts_held_back():
                jobs = executor.map_array(carry_out_points, [task] * len(portions), portions)
                if self._is_slurm:
                    stack.enter_context(noted(folder, [job.job_id for job in jobs]))
                stack.callback(_cancel, jobs)
            portion_of = dict(zip((job.job_id for job in jobs), portions, strict=True))
            for job in as_completed(jobs, poll_frequency=_POLL_S):
                try:
                    tally = job.result()
                except (FailedJobError, UncompletedJobError):
                    tally = None
                yield Portion(portion_of[job.job_id], tally)

    @property
    def _is_slurm(self) -> bool:
        return self._cluster == "slurm"

    def _executor(self, folder: Path) -> Any:
        import submitit

        executor = submitit.AutoExecutor(folder=folder / "%j", cluster=self._cluster)
        own = {"name": "ropebridge-sweep", "cpus_per_task": 1, "slurm_array_parallelism": self._jobs}
        settings = {f"slurm_{name}": value for name, value in self._settings.items()}
        try:
            executor.update_parameters(**{**own, **settings})
        except (NameError, TypeError, ValueError) as error:
            problem = f"submitit refuses the settings: {error}"
            raise InputError(problem, where="slurm", valid="give settings that submitit knows") from None
        return executor


def _warn_on_stderr() -> None:
    """Stop submitit's logger from printing warnings on standard output; it prints them on standard error as well."""
    from submitit.core.logger import get_logger

    for handler in list(get_logger().handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            get_logger().removeHandler(handler)


def _cancel(jobs: Sequence[Any]) -> None:
    for job in jobs:
        if not job.done():
            job.cancel(check=False)
