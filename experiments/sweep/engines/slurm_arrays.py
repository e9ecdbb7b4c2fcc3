"""Arrays of jobs that are under way: who comes after a command that was killed ends them before it begins anew."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traces.common.atomic import write_text_atomically

_FILE = "under-way"


def cancel_left(folder: Path) -> None:
    """End the array that a command has left in its folder: its points would be carried out twice."""
    path = folder / _FILE
    if path.is_file():
        # Slurm may have forgotten one that has ended since.
        subprocess.run(["scancel", "--quiet", *path.read_text().split()], capture_output=True, check=False)
        path.unlink()


@contextmanager
def noted(folder: Path, job_ids: list[str]) -> Iterator[None]:
    """Around the time in which jobs are under way: the folder says so.

    Args:
        folder: Of submitit.
        job_ids: As submitit names them: that of the array, and a number.
    """
    arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
    write_text_atomically(folder / _FILE, "".join(f"{array}\n" for array in arrays))
    try:
        yield
    finally:
        (folder / _FILE).unlink(missing_ok=True)
