"""Keeps the process of one rank going: started as ``python -m executor.control.keeper AGENT_PID JOB_FOLDER``.

Who starts the ranks of a machine ends all when one ends. So what it starts is this, which is small and has nothing to
fail at: it starts the rank's process, ends it where it stands still, tells the job's agent when it is gone, and starts
another one. A process that ends by itself has said why, and then so does this one. On another machine than the agent's
it also ends the process when the agent is out of reach, for the others have gone on without it, and comes back later.
"""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from executor.core.job import INCARNATION
from executor.core.json_lines import AGENT_ADDRESS, JOB, SILENCE, STORE_ADDRESS, KeeperLine
from executor.core.liveness import LivenessProbe, beat_path
from executor.core.subprocesses import die_with_parent
from traces.common.atomic import write_text_atomically

# The model's code on this machine: the job's documents are data, and name no code here.
CODE = "ROPEBRIDGE_CODE"
# How long to try to reach an agent on another machine, seconds.
ARRIVAL = "ROPEBRIDGE_ARRIVAL"

_PAUSE_S = 0.05
# A process that a signal has stopped, and one that shows no sign of life, is looked at so often before it is ended.
_STOPPED_LOOKS = 20
_SILENT_LOOKS = 1200

# Who ends so soon, so many times in a row, will do so for ever.
_SOON_S = 20.0
_MOST_SOON = 3

# For an agent on another machine: from one try to the next, seconds, and the last bytes of a log that say why.
_AGAIN_S = 1.0
_LOG_BYTES = 4000


def main(agent: str, folder: str) -> None:
    """Start processes of this rank until one ends by itself."""
    die_with_parent(int(agent))
    job, rank = Path(folder), int(os.environ["RANK"])
    silence_s, arrival_s = float(os.environ[SILENCE]), float(os.environ.get(ARRIVAL, "0"))
    until_s = time.monotonic() + arrival_s
    while True:
        line = _reach_agent(silence_s, until_s)
        line.say(rank=rank, job=os.environ[JOB])
        heard = line.hear() or {}
        if "incarnation" in heard:
            _settle_in(job, rank, heard)
            heard = _keep(job, rank, heard["incarnation"], line) or {}
            until_s = time.monotonic() + arrival_s
        line.close()
        if "over" in heard:
            sys.exit("the job has failed: the head says why" if heard["status"] else 0)
        if time.monotonic() > until_s or not silence_s:
            sys.exit("the head of another job is at this one's address" if "stranger" in heard else 1)
        time.sleep(_AGAIN_S)


def _reach_agent(silence_s: float, until_s: float) -> KeeperLine:
    """Return a line to the agent; if that is on another machine, this one may have come first, or be cut off."""
    host, _, port = os.environ[AGENT_ADDRESS].rpartition(":")
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=silence_s or None)
            break
        except OSError as error:
            if time.monotonic() > until_s:
                sys.exit(f"the job's head at {host}:{port} cannot be reached: {error.strerror or error}")
            time.sleep(_AGAIN_S)
    connection.settimeout(None)
    return KeeperLine(connection, silence_s)


def _settle_in(job: Path, rank: int, welcome: dict[str, Any]) -> None:
    """On another machine than the agent's: write the job's documents, and tell the rank where the store is.

    A head that was started again may have others than the one before.
    """
    (job / f"error-{rank}.json").unlink(missing_ok=True)
    if "store_port" in welcome:
        # The head may know itself by another address than the one at which it is reached from here.
        head, port = os.environ[AGENT_ADDRESS].rpartition(":")[0], str(welcome["store_port"])
        os.environ.update({STORE_ADDRESS: f"{head}:{port}", "MASTER_ADDR": head, "MASTER_PORT": port})
    for name, document in welcome.get("job", {}).items():
        if name == "scenario.json" and document["code"] is not None:
            document["code"]["path"] = os.environ.get(CODE) or document["code"]["path"]
        path = job / name
        if not path.exists() or json.loads(path.read_text()) != document:
            write_text_atomically(path, json.dumps(document))


def _keep(job: Path, rank: int, incarnation: int, line: KeeperLine) -> dict[str, Any] | None:
    """Start processes of the rank until one ends by itself, which ends this process too, or the agent is gone.

    Returns:
        What the agent has said at last; None if nothing.
    """
    soon = 0
    is_gone, said = threading.Event(), list[dict[str, Any]]()
    threading.Thread(target=_await_end, args=(line, is_gone, said), name="line", daemon=True).start()
    while not is_gone.is_set():
        began_s = time.monotonic()
        status = _run(job, rank, incarnation, is_gone)
        if is_gone.is_set():
            break
        if status >= 0:
            line.say(status=status, error=_error(job, rank) if status else None)
            sys.exit(status)
        soon = soon + 1 if time.monotonic() - began_s < _SOON_S else 0
        if soon >= _MOST_SOON:
            line.say(status=status, error=None)
            # As if it had been started without this one: by the same signal.
            os.kill(os.getpid(), -status)
        line.say(gone=incarnation)
        incarnation += 1
    return said[0] if said else None


def _await_end(line: KeeperLine, is_gone: threading.Event, said: list[dict[str, Any]]) -> None:
    """Hear that the job is over, or that the agent is gone."""
    if (heard := line.hear()) is not None:
        said.append(heard)
    is_gone.set()


def _run(job: Path, rank: int, incarnation: int, is_gone: threading.Event) -> int:
    """Return the status of a process of the rank, from its start to its end; negative for a signal."""
    command = [sys.executable, "-m", "executor.rank.worker", str(os.getpid()), str(job)]
    process = subprocess.Popen(command, env={**os.environ, INCARNATION: str(incarnation)})
    pulse = LivenessProbe(beat_path(job, rank), _STOPPED_LOOKS, _SILENT_LOOKS, _PAUSE_S)
    try:
        while (status := process.poll()) is None:
            time.sleep(_PAUSE_S)
            if pulse.look() or is_gone.is_set():
                process.kill()
        return status
    finally:
        process.kill()


def _error(job: Path, rank: int) -> dict[str, Any]:
    """Why the process has ended: its last words, or else the end of what it printed."""
    try:
        words: dict[str, Any] = json.loads((job / f"error-{rank}.json").read_text())
        return words
    except (OSError, ValueError):
        pass
    return {"printed": _printed()}


def _printed() -> str:
    """The end of this process's log, which its rank shares; nothing where that is a terminal or a pipe."""
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):
            return ""
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(max(0, os.fstat(2).st_size - _LOG_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
