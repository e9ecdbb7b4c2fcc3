"""All timeouts and intervals in the control of a job.

The environment variable ``ROPEBRIDGE_TIMEOUTS``, for tests and unusual networks, changes some of them by a JSON object
such as ``{"stopped_s": 1.0}``. The processes of a job inherit the variable; each host of a job needs its own.
"""

import os
from dataclasses import dataclass, fields

from traces.common.errors import InputError, find_by_name
from traces.common.text import checked_number, parse_object

_VARIABLE = "ROPEBRIDGE_TIMEOUTS"

# Ten days: longer times overflow in some calls of the operating system.
_MOST_S = 864_000


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Intervals in seconds.

    Attributes:
        proof_s: Time limit for the authentication of a new connection, after which the head closes the connection.
        reach_s: Time for which a process tries to reach the control server of its own host's launcher.
        retry_s: Pause between two attempts to reach the head.
        attach_s: Time for which ranks train on without a launcher, until another one attaches.
        arrival_s: Time limit for all ranks to load torch and to send the facts that `Agreements` compares first.
        arrival_per_rank_s: Addition to ``arrival_s`` per rank, since many ranks may share few processor cores.
        head_start_s: Time from the agreement on the start of the run to its second 0, besides the links' latency.
        connect_s: Time limit for gloo to connect the ranks of a session with each other.
        recv_s: Time limit for a message of a peer; long, since a link may be out for minutes.
        abandon_s: Time limit for a thread that sends to a peer to end after the session; see `Connection.close`.
        trouble_s: Time from a rank's report of a lost connection until all ranks connect anew, unless an agent reports
            the end of a process within this time.
        explanation_s: Time that the head waits, after a rank has lost a peer, for a report of the cause.
        session_end_s: Time limit for a rank with a lost connection to receive the end of the session from the head.
        heartbeat_s: Interval at which a rank touches its heartbeat file.
        probe_s: Interval at which an agent checks the processes of its ranks.
        stopped_s: Time after which a process that a signal has stopped is killed, if the run ends with a lost rank.
        stopped_recovering_s: Time after which a stopped process is killed if the run survives lost ranks; equal to
            `planner.scenario.faults.HANG_LIMIT_S`, which loads NumPy and so threads (executor/wan/linux.py).
        silent_s: Time without a heartbeat before which no rank's process is killed; long, since some extensions hold
            Python's global lock, so that the heartbeat's thread cannot run. Longer if there were such pauses before.
        early_death_s: Age below which the death of a process counts as early; the run ends after three early deaths
            of a rank in a row.
        agent_exit_s: Time limit for an agent to end its ranks, after which the agent is killed.
        host_exit_s: Time limit for the processes of all hosts to end after the job.
        clock_interval_s: Interval at which a rank measures the offset of its clock from the head's.
        clock_answer_s: Time limit for the head to answer with a reading of its clock.
        shared_folder_s: Time limit for a file that the head has written into a shared folder to appear on other hosts.
        shared_folder_retry_s: Pause between two checks for that file.
    """

    proof_s: float = 5.0
    reach_s: float = 30.0
    retry_s: float = 1.0
    attach_s: float = 60.0
    arrival_s: float = 45.0
    arrival_per_rank_s: float = 3.0
    head_start_s: float = 0.5
    connect_s: float = 15.0
    recv_s: float = 1800.0
    abandon_s: float = 0.25
    trouble_s: float = 2.0
    explanation_s: float = 2.0
    session_end_s: float = 60.0
    heartbeat_s: float = 1.0
    probe_s: float = 0.05
    stopped_s: float = 10.0
    stopped_recovering_s: float = 4.0
    silent_s: float = 60.0
    early_death_s: float = 20.0
    agent_exit_s: float = 5.0
    host_exit_s: float = 10.0
    clock_interval_s: float = 5.0
    clock_answer_s: float = 30.0
    shared_folder_s: float = 10.0
    shared_folder_retry_s: float = 0.5


def timeouts() -> Timeouts:
    """Return the timeouts of this process, with the changes of ``ROPEBRIDGE_TIMEOUTS``.

    Raises:
        InputError: The variable is not a JSON object of timeouts in seconds.
    """
    names = [each.name for each in fields(Timeouts)]
    try:
        changes = parse_object(os.environ.get(_VARIABLE, "{}"), 'give an object such as {"stopped_s": 1.0}')
        for name, value in changes.items():
            find_by_name(name, dict.fromkeys(names), "timeout")
            if checked_number(value, name) > _MOST_S:
                raise InputError(f"{value:g} s is too long", name, f"give {_MOST_S:,} s or less")
    except InputError as error:
        raise error.within(f"the environment variable {_VARIABLE}") from None
    return Timeouts(**changes)
