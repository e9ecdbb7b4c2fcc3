"""The processes of this machine's ranks in a job of several machines: started, watched and ended together."""

import os
import sys
import time
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

from executor.hosts import HostPart
from executor.job import JobFolder

_PAUSE_S = 0.1
_GRACE_S = 5


def run_keepers(job: JobFolder, part: HostPart, ranks: int) -> dict[int, int]:
    """Run a keeper for each rank of a machine until all have ended, or one has failed.

    torchrun would open stores of its own on every network interface, for a rendezvous that the keepers do not need;
    this is what it starts processes with.

    Args:
        job: Their folder, on this machine.
        part: This machine's.
        ranks: Of the whole job.

    Returns:
        Rank to exit status of those that have failed.
    """
    numbers = range(len(part.ranks))
    command = ("-m", "executor.keeper", str(os.getpid()), str(job.path))
    processes = start_processes(
        "keepers",
        sys.executable,
        dict.fromkeys(numbers, command),
        {number: _environment(part.ranks, number, ranks) for number in numbers},
        DefaultLogsSpecs(str(job.workers_logs), redirects=Std.ALL),
    )
    try:
        while (done := processes.wait(_PAUSE_S, _PAUSE_S)) is None:
            time.sleep(_PAUSE_S)
    finally:
        processes.close(timeout=_GRACE_S)
    return {part.ranks[number]: failure.exitcode for number, failure in done.failures.items()}


def _environment(own: Sequence[int], number: int, ranks: int) -> dict[str, str]:
    return {
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(len(own)),
        "RANK": str(own[number]),
        "WORLD_SIZE": str(ranks),
        # As under torchrun, whose store is not a rank's own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
