"""A rank of a machine that is not the job's head, where torchrun starts them.

``torchrun --nproc-per-node=RANKS -m executor.deploy.join_torchrun JOB HOST [HEAD_ADDRESS]``, and what
`executor.deploy.torchrun` says of the rendezvous.
"""

import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from executor.control import keeper
from executor.control.member import member_environment
from executor.core.clock import create_origin
from executor.deploy.bundle import read_bundle
from traces.common.errors import RopebridgeError
from traces.common.names import find_by_name


def main(folder: str, name: str, head: str = "") -> None:
    """Keep this machine's rank of the number that torchrun says."""
    # torchrun ends its processes by it; what was made here goes with them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bundle = read_bundle(Path(folder))
    hosts = replace(bundle.hosts, address=head or bundle.hosts.address)
    part = find_by_name(name, {part.name: part for part in hosts.parts}, "host", where="HOST")
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) != len(part.ranks):
        sys.exit(f"host {name} has {len(part.ranks)} ranks: torchrun --nproc-per-node={len(part.ranks)} starts them")
    os.environ.update(member_environment(hosts, name, bundle.code))
    os.environ["RANK"] = str(part.ranks[int(os.environ["LOCAL_RANK"])])
    os.environ["WORLD_SIZE"] = str(hosts.rank_count)
    with tempfile.TemporaryDirectory(prefix="ropebridge-", ignore_cleanup_errors=True) as place:
        create_origin(Path(place) / "origin")
        keeper.main(str(os.getppid()), place)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RopebridgeError as error:
        sys.exit(f"ropebridge: {error}")
