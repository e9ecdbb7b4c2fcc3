"""Runs torchrun for one job in a process of its own, and writes down which rank failed first.

Called as ``python -m executor.agent PARENT_PID JOB_FOLDER RANKS``.
"""

import json
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from executor.job import JobFolder
from executor.parent import die_with_parent


def main(parent: str, folder: str, ranks: str) -> int:
    """Run the workers of a job on this machine; return the exit status."""
    die_with_parent(int(parent))
    arguments = [
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={ranks}",
        "-m",
        "executor.worker",
        str(os.getpid()),
        folder,
    ]
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        exit_codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        JobFolder(Path(folder)).failure.write_text(json.dumps(exit_codes))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
