"""Keeps the process of one rank going: started by torchrun as ``python -m executor.keeper AGENT_PID JOB_FOLDER``.

torchrun ends all ranks when one ends. So what it starts is this, which is small and has nothing to fail at: it starts
the rank's process, ends it where it stands still, tells the agent when it is gone, and starts another one. A process
that ends by itself has said why, and then so does this one.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from executor.parent import die_with_parent
from executor.pulse import Pulse, beat_path

# Says where the agent listens: HOST:PORT.
AGENT_ADDRESS = "ROPEBRIDGE_AGENT"
# Which process of its rank a process is, from 0.
INCARNATION = "ROPEBRIDGE_INCARNATION"

_PAUSE_S = 0.05
# A process that a signal has stopped, and one that shows no sign of life, is looked at so often before it is ended.
_STOPPED_LOOKS = 20
_SILENT_LOOKS = 1200

# Who ends so soon, so many times in a row, will do so for ever.
_SOON_S = 20.0
_MOST_SOON = 3


def main(agent: str, folder: str) -> None:
    """Start processes of this rank until one ends by itself."""
    die_with_parent(int(agent))
    job, rank = Path(folder), int(os.environ["RANK"])
    host, _, port = os.environ[AGENT_ADDRESS].rpartition(":")
    soon = 0
    with socket.create_connection((host, int(port))) as line:
        incarnation = 0
        while True:
            began_s = time.monotonic()
            status = _run(job, rank, incarnation)
            if status >= 0:
                sys.exit(status)
            soon = soon + 1 if time.monotonic() - began_s < _SOON_S else 0
            if soon >= _MOST_SOON:
                # As if torchrun had started it: by the same signal.
                os.kill(os.getpid(), -status)
            line.sendall(f"{rank} {incarnation}\n".encode())
            incarnation += 1


def _run(job: Path, rank: int, incarnation: int) -> int:
    """Return the status of a process of the rank, from its start to its end; negative for a signal."""
    command = [sys.executable, "-m", "executor.worker", str(os.getpid()), str(job)]
    process = subprocess.Popen(command, env={**os.environ, INCARNATION: str(incarnation)})
    pulse = Pulse(beat_path(job, rank), _STOPPED_LOOKS, _SILENT_LOOKS, _PAUSE_S)
    try:
        while (status := process.poll()) is None:
            time.sleep(_PAUSE_S)
            if pulse.look():
                process.kill()
        return status
    finally:
        process.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
