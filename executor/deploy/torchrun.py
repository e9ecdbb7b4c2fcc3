"""Deployment by hand: a file of commands, which the user runs on each host.

On every host except the head torchrun starts the host's agent, which starts the ranks:
``torchrun --nproc-per-node=1 -m executor.deploy.torchrun JOB HOST [HEAD_ADDRESS]``.
"""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from executor.control.node_agent import run_member
from executor.core.subprocesses import die_with_parent
from executor.deploy.deployment import Deployment, read_bundle
from executor.deploy.target import Target, render
from traces.common.errors import RopebridgeError, find_by_name


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the file with the commands of all hosts."""
    return {"commands.sh": render("torchrun.sh", deployment)}


TARGET = Target("torchrun", files)


def main(folder: str, host: str, head: str = "") -> None:
    """Run this host's agent and, through it, its ranks; the arguments are those of the command line."""
    die_with_parent(os.getppid())
    # torchrun ends its processes by SIGTERM: raise SystemExit, so that the agent ends the ranks and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bundle = read_bundle(Path(folder))
    hosts = replace(bundle.hosts, address=head or bundle.hosts.address)
    find_by_name(host, {part.name: part for part in hosts.parts}, "host", where="HOST")
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        sys.exit("--nproc-per-node must be 1: torchrun starts one agent per host, and the agent starts the ranks")
    run_member(hosts, host, bundle.code, bundle.checkpoints, bundle.data)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RopebridgeError as error:
        sys.exit(f"ropebridge: {error}")
