"""The processes of this machine's ranks: started, watched and ended together."""

import os
import sys
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

from executor.core.job import JobFolder

_PAUSE_S = 0.05
_GRACE_S = 5


def run_ranks(
    job: JobFolder, module: str, own: Sequence[int], ranks: int, meeting: Mapping[str, str]
) -> dict[int, int]:
    """Run a process for each rank of this machine until all have ended, or one has failed.

    This is what torchrun starts processes with. torchrun itself would open a store for a rendezvous that nobody needs
    here, on every network interface, and unpickle what it finds there.

    Args:
        job: Their folder, on this machine; what they print goes there.
        module: What each runs, as ``python -m MODULE PID JOB_FOLDER``, the first this process's.
        own: This machine's ranks.
        ranks: Of the whole job.
        meeting: Environment variables that say where the ranks meet.

    Returns:
        Rank to exit status of those that have failed.
    """
    numbers = range(len(own))
    command = ("-m", module, str(os.getpid()), str(job.path))
    processes = start_processes(
        "ranks",
        sys.executable,
        dict.fromkeys(numbers, command),
        {number: {**meeting, **_place(own, number, ranks)} for number in numbers},
        DefaultLogsSpecs(str(job.workers_logs), redirects=Std.ALL),
    )
    try:
        done = processes.wait(period=_PAUSE_S)
        assert done is not None, "there is no time by which they have to end"
    finally:
        processes.close(timeout=_GRACE_S)
    return {own[number]: failure.exitcode for number, failure in done.failures.items()}


def _place(own: Sequence[int], number: int, ranks: int) -> dict[str, str]:
    return {
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(len(own)),
        "RANK": str(own[number]),
        "WORLD_SIZE": str(ranks),
        # As under torchrun: the store is not a rank's own, and nobody has been started before.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
