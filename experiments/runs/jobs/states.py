"""The states of a job, as pure functions: what may follow what, which reports still count, which job a host takes.

An attempt is one process of a host that runs the job; a later attempt goes on from the checkpoints of the earlier ones.
Attempts are numbered from 1. Only the report of the newest attempt counts: a host that was cut off, and whose job is
placed elsewhere by now, names an older number.

    queued ──place──▶ running ──end──▶ finished | failed
      ▲  │               │ │
      │  └──stop──▶ stopped◀── end or loss ── stopping ◀──stop── running
      └────── loss ──────┘
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

# A job whose attempts were lost this often is given up: it may be the reason for which its hosts die.
MOST_ATTEMPTS = 20

# Number of devices by their kind, as in a scenario.
Devices = Mapping[str, int]


class State(StrEnum):
    """State of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    # The user has asked the job to stop, and its host has not confirmed this yet.
    STOPPING = "stopping"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


# The states in which a job is on a host, and those that it never leaves.
ON_HOST = frozenset({State.RUNNING, State.STOPPING})
ENDED = frozenset({State.FINISHED, State.FAILED, State.STOPPED})


class Outcome(StrEnum):
    """How an attempt has ended, by the report of its host: ``lost`` if its process ended without a result."""

    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's place in its life.

    Attributes:
        attempt: Number of the newest attempt; 0 before the first.
        host: Name of the host that has the attempt; empty unless the state is one of `ON_HOST`.
        reason: Why the job has failed, or why its last attempt was lost; empty if there is nothing to say.
    """

    state: State = State.QUEUED
    attempt: int = 0
    host: str = ""
    reason: str = ""


def place(job: JobState, host: str) -> JobState:
    """Return a queued job with a new attempt on a host."""
    if job.state is not State.QUEUED:
        raise ValueError(f"a job that is {job.state} cannot be placed")
    return JobState(State.RUNNING, job.attempt + 1, host)


def end(job: JobState, attempt: int, outcome: Outcome, reason: str) -> JobState | None:
    """Return the job after a host's report that an attempt has ended; None if the report comes too late to count."""
    if job.state not in ON_HOST or attempt != job.attempt:
        return None
    if outcome is Outcome.LOST:
        return lose(job, reason)
    return JobState(State(outcome.value), attempt, "", reason)


def lose(job: JobState, reason: str) -> JobState:
    """Return a job whose attempt is lost: queued again, at its old place in the queue, unless it has to end."""
    if job.state not in ON_HOST:
        raise ValueError(f"a job that is {job.state} has no attempt to lose")
    if job.state is State.STOPPING:
        return JobState(State.STOPPED, job.attempt)
    if job.attempt >= MOST_ATTEMPTS:
        return JobState(State.FAILED, job.attempt, "", f"{job.attempt} attempts were lost, the last one since {reason}")
    return JobState(State.QUEUED, job.attempt, "", reason)


def stop(job: JobState) -> JobState:
    """Return a job after the user's request to stop it; one that has ended stays as it is."""
    if job.state is State.QUEUED:
        return JobState(State.STOPPED, job.attempt)
    if job.state is State.RUNNING:
        return replace(job, state=State.STOPPING)
    return job


def fits(needed: Devices, offered: Devices) -> bool:
    """Return whether a host that offers some devices has all that a job needs."""
    return all(offered.get(kind, 0) >= count for kind, count in needed.items())


def choose_jobs(queue: Sequence[tuple[str, Devices]], offered: Devices, used: Iterable[Devices]) -> list[str]:
    """Return the jobs that a host takes now.

    A job that fits on the host, but not beside the jobs that the host has, makes all later jobs wait: otherwise small
    jobs could keep a large one waiting for ever. Jobs that are too large for the host are left to others.

    Args:
        queue: Each queued job, the oldest first, with the devices that it needs.
        offered: All devices of the host.
        used: The devices of each job that the host has.
    """
    free = Counter(offered)
    for devices in used:
        free.subtract(devices)
    chosen = []
    for job, needed in queue:
        if fits(needed, free):
            chosen.append(job)
            free.subtract(needed)
        elif fits(needed, offered):
            break
    return chosen
