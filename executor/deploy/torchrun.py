"""Commands for people who start processes by hand or with a tool of their own.

On every host but the head, torchrun starts the host's agent, which starts the ranks:
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
    """Return the commands of each host."""
    return {"commands.sh": render("torchrun.sh", deployment)}


TARGET = Target("torchrun", files)


def main(folder: str, host: str, head: str = "") -> None:
    """Run this host's ranks."""
    die_with_parent(os.getppid())
    # torchrun ends its processes with SIGTERM; the ranks and the temporary folder must go with them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bundle = read_bundle(Path(folder))
    hosts = replace(bundle.hosts, address=head or bundle.hosts.address)
    find_by_name(host, {part.name: part for part in hosts.parts}, "host", where="HOST")
    if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        sys.exit("torchrun starts the agent of a host, which starts its ranks: give '--nproc-per-node=1'")
    run_member(hosts, host, bundle.code, bundle.checkpoints)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RopebridgeError as error:
        sys.exit(f"ropebridge: {error}")
