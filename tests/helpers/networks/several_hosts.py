"""Jobs whose ranks are on several hosts: here processes that know of each other only what hosts would."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from executor.core.control_channel import new_key
from executor.core.hosts import HostPart, Hosts

_MEMBER = """
import sys
from pathlib import Path
from executor.core.control_channel import new_key
from executor.core.hosts import read_hosts
from executor.control.node_agent import run_member
hosts, name, code, checkpoints = sys.argv[1:]
run_member(read_hosts(Path(hosts)), name, Path(code) if code else None, checkpoints)
"""


def hosts_on_loopback(
    parts: Sequence[tuple[str, tuple[int, ...]]], *, arrival_s: float = 60.0, silence_s: float = 8.0
) -> Hosts:
    """The first is the head."""
    return Hosts(
        parts[0][0],
        "127.0.0.1",
        free_port(),
        arrival_s,
        silence_s,
        tuple(HostPart(name, ranks, "lo") for name, ranks in parts),
        new_key(),
    )


def start_member(
    hosts: Hosts, name: str, folder: Path, code: Path | None, within: Sequence[str] = (), checkpoints: str = ""
) -> "subprocess.Popen[str]":
    """Start a host's part; ``folder`` takes what it needs to know, and is where it puts its temporary files.

    Args:
        hosts: Of the job.
        name: This one's.
        folder: Its own.
        code: The model's file.
        within: A command that runs another one.
        checkpoints: The folder for checkpoints on this host.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "hosts.json"
    hosts.write(path)
    return subprocess.Popen(
        [*within, sys.executable, "-c", _MEMBER, str(path), name, str(code or ""), checkpoints],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
