"""Runs commands of ropebridge in the hosts of a test bed: started in the control host's network, as the agent is.

Called as ``python linked_hosts_program.py JOB_FOLDER PAIRS``, with PAIRS a JSON list of objects: ``near`` and ``far``,
ranks; ``wmem``, the largest send buffer of both hosts in bytes, or null; ``commands``, each a list of arguments, begun
one after the other on the near host while a responder listens on the far one. In them RESPONDER stands for its address.
Prints a JSON list, for each pair a list of [status, stdout, stderr] of its commands and, at last, of its responder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from executor.core.clock import announce_origin
from executor.core.job import JobFolder
from executor.core.subprocesses import die_with_parent
from executor.wan.linux import set_tcp
from executor.wan.testbed import device_address, enter_device_network, running_relay

PORT = 7117


def start(rank: int, wmem_bytes: int | None, arguments: list[str]) -> "subprocess.Popen[str]":
    """Start ropebridge in a rank's network."""
    parent = os.getpid()

    def enter() -> None:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ["RANK"] = str(rank)
        enter_device_network()
        if wmem_bytes is not None:
            misses = set_tcp({"tcp_wmem": [f"4096 16384 {wmem_bytes}"]})
            assert not misses or "4096\t16384" in misses[0], misses

    return subprocess.Popen(
        [str(Path(sys.executable).with_name("ropebridge")), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enter,
    )


def serve(pair: dict[str, Any]) -> "subprocess.Popen[str]":
    """Start the responder of a pair."""
    address = f"{device_address(pair['far'])}:{PORT}"
    responder = start(pair["far"], pair["wmem"], ["profile", "network", "--listen", address])
    assert responder.stderr is not None
    assert "serving measurements" in responder.stderr.readline()
    return responder


def measure(pair: dict[str, Any], responder: "subprocess.Popen[str]") -> list[list[Any]]:
    """Run the commands of a pair."""
    address = f"{device_address(pair['far'])}:{PORT}"
    outcomes = []
    for command in pair["commands"]:
        arguments = [address if each == "RESPONDER" else each for each in command]
        near = start(pair["near"], pair["wmem"], arguments)
        stdout, stderr = near.communicate(timeout=100)
        outcomes.append([near.returncode, stdout, stderr])
    responder.send_signal(signal.SIGINT)
    stdout, stderr = responder.communicate(timeout=20)
    return [*outcomes, [responder.returncode, stdout, stderr]]


def main(folder: str, pairs: str) -> None:
    job = JobFolder(Path(folder))
    wanted = json.loads(pairs)
    with running_relay(job), ThreadPoolExecutor(len(wanted)) as pool:
        responders = [serve(pair) for pair in wanted]
        announce_origin(job.origin, time.monotonic() + 1.0)
        print(json.dumps(list(pool.map(measure, wanted, responders))))


if __name__ == "__main__":
    main(*sys.argv[1:])
