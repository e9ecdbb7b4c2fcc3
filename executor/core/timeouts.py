"""Every interval that the control of a job waits for, in one place.

A test, or a person with an unusual network, changes some of them by the environment variable ``ROPEBRIDGE_TIMEOUTS``,
which holds a JSON object such as ``{"stopped_s": 1.0}``. The processes of a job inherit it; on several hosts each host
reads its own.
"""

import json
import os
from dataclasses import dataclass

_VARIABLE = "ROPEBRIDGE_TIMEOUTS"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Intervals in seconds.

    Attributes:
        proof_s: Time in which a new connection must prove that it knows the job's key; the head then closes it.
        reach_s: Time for which a process tries to reach the control server of its own host's launcher.
        retry_s: Pause between two attempts to reach the head.
        arrival_s: Time for all ranks to load torch and to come to the first comparison of facts.
        arrival_per_rank_s: Additional time for each rank, since many ranks may share few processor cores.
        head_start_s: Time from the agreement on the start of the run to its second 0, besides the links' latency.
        connect_s: Time for gloo to connect the ranks of a session with each other.
        recv_s: Time to wait for a message of a peer; a link may be out for minutes.
        trouble_s: Time to wait, after a lost connection, for news of a dead peer; then every rank connects anew.
        explanation_s: Time to wait, after a rank has lost a peer, for the cause of that.
        session_end_s: Time that a rank with a lost connection waits for the head's decision.
        heartbeat_s: Interval at which a rank touches its file.
        probe_s: Interval at which an agent checks whether its ranks go on.
        stopped_s: Time for which a signal may stop a rank's process in a run that ends with it.
        stopped_recovering_s: The same in a run that goes on without it.
        silent_s: Time without a heartbeat after which a rank's process is ended; long enough for code that lets no
            other thread of its process run, as some extensions do.
        early_death_s: Age below which the death of a process counts as early; a rank that dies early three times in a
            row is not started again.
        agent_exit_s: Time for an agent to end its ranks before it is killed.
        host_exit_s: Time for agents of other hosts to end after the job.
        clock_interval_s: Interval at which a rank measures the offset of its clock from the head's.
        clock_answer_s: Time for the head to answer such a question.
        shared_folder_s: Time until other hosts see what the head has written into a shared folder.
        shared_folder_retry_s: Pause between two looks into that folder.
    """

    proof_s: float = 5.0
    reach_s: float = 30.0
    retry_s: float = 1.0
    arrival_s: float = 45.0
    arrival_per_rank_s: float = 3.0
    head_start_s: float = 0.5
    connect_s: float = 15.0
    recv_s: float = 1800.0
    trouble_s: float = 2.0
    explanation_s: float = 2.0
    session_end_s: float = 60.0
    heartbeat_s: float = 1.0
    probe_s: float = 0.05
    stopped_s: float = 10.0
    stopped_recovering_s: float = 1.0
    silent_s: float = 60.0
    early_death_s: float = 20.0
    agent_exit_s: float = 5.0
    host_exit_s: float = 10.0
    clock_interval_s: float = 5.0
    clock_answer_s: float = 30.0
    shared_folder_s: float = 10.0
    shared_folder_retry_s: float = 0.5


def timeouts() -> Timeouts:
    """Return the intervals of this process, with what its environment changes."""
    return Timeouts(**json.loads(os.environ.get(_VARIABLE, "{}")))
