"""One rank of a job, started as ``python -m executor.rank.worker AGENT_PID JOB_FOLDER``."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from executor.core.failures import give_up, rank_name
from executor.core.job import INCARNATION, JobFolder, rank_devices
from executor.core.liveness import start_beating
from executor.core.subprocesses import die_with_parent
from executor.rank.context import RankConfig
from executor.rank.handshake import Handshake, Job, check_ranks, job_facts
from executor.rank.rank import HEAD_START_S, Rank
from executor.training.device import keep_freed_memory
from executor.transport.rendezvous import check_interface, holds_store, reach_store
from executor.wan.testbed import enter_device_network
from planner.files.plan import read_plan
from traces.common.errors import InputError, RunError

# Every rank loads torch before it can say that it is there, on a machine that may have few cores for many ranks.
_ARRIVAL_S = 45.0
_ARRIVAL_OF_EACH_S = 3.0


def main(agent: str, folder: str) -> None:
    """Run this process's rank of the job in ``folder``."""
    die_with_parent(int(agent))
    keep_freed_memory()
    enter_device_network()
    job, rank = JobFolder(Path(folder)), int(os.environ["RANK"])
    start_beating(job, rank)
    if incarnation := int(os.environ.get(INCARNATION, "0")):
        join_run(job, rank, incarnation)
    else:
        run_rank(job, rank, int(os.environ["WORLD_SIZE"]), lambda: reach_store(rank))
    # All is written and closed. Threads of torch abort a process in which what they look at is taken down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_rank(
    job: JobFolder, rank: int, ranks: int, reach: Callable[[], Store], head_start_s: float = HEAD_START_S
) -> None:
    """Run one rank of a job, from the handshake to what it leaves; end this process if that fails.

    Args:
        job: Its files.
        rank: This one.
        ranks: Their number.
        reach: Returns the store in which the ranks of this job, and of no other, meet.
        head_start_s: From agreeing on the start of the run to the start; less is for runs of which nobody asks when
            things happened, seconds.
    """
    name = rank_name(rank, _device(job, rank))
    end = partial(give_up, job, rank, name)
    with _saying_why(end):
        handshake = Handshake(reach(), rank, ranks, name, holds_store=holds_store(rank))
        given = handshake.agree("job", lambda: _read(job), _ARRIVAL_S + _ARRIVAL_OF_EACH_S * ranks)
        check_ranks(given, ranks)
        Rank(RankConfig.of(job, rank, given), end).run(handshake, head_start_s)


def join_run(job: JobFolder, rank: int, incarnation: int) -> None:
    """Take the place of a process of a rank that is gone; end this process if that fails."""
    end = partial(give_up, job, rank, rank_name(rank, _device(job, rank)))
    with _saying_why(end):
        Rank(RankConfig.of(job, rank, job.read()), end).join(incarnation)


@contextmanager
def _saying_why(end: Callable[[Exception], None]) -> Iterator[None]:
    """Around what a rank does: ``end`` gets what is raised, and ends this process."""
    try:
        yield
    except Exception as error:
        end(error)
    except SystemExit as error:
        # As an exit status of its own it would end this rank without a word, and others would seem to be the cause.
        end(RunError(f"the model's code ended the process: SystemExit({error.code!r})"))


def _device(job: JobFolder, rank: int) -> str:
    """This rank's device, for messages; nothing if there is none."""
    try:
        return rank_devices(*job.read())[rank]
    except (InputError, IndexError, OSError, ValueError):
        return _device_of_plan(job, rank)


def _device_of_plan(job: JobFolder, rank: int) -> str:
    """The same where the plan is all that can be read."""
    try:
        return read_plan(job.path / "plan.json").devices[rank]
    except (InputError, IndexError, OSError):
        return ""


def _read(job: JobFolder) -> tuple[Job, dict[str, str]]:
    check_interface()
    given = job.read()
    return given, job_facts(job, given)


if __name__ == "__main__":
    main(*sys.argv[1:])
