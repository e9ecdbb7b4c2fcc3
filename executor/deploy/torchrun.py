"""Commands for people who start processes by hand or with a tool of their own.

Every host but the head starts its ranks with torchrun, as
``torchrun --nproc-per-node=RANKS -m executor.deploy.torchrun JOB HOST [HEAD_ADDRESS]``.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from executor.deploy.deployment import Deployment, read_bundle
from executor.deploy.target import Target, render
from traces.common.errors import RopebridgeError
from traces.common.names import find_by_name


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the commands of each host."""
    return {"commands.sh": render("torchrun.sh", deployment)}


TARGET = Target("torchrun", files)


def main(folder: str, host: str, head: str = "") -> None:
    """Run this host's rank that torchrun's LOCAL_RANK selects."""
    # They load torch.
    from executor.control import keeper
    from executor.control.member import member_environment
    from executor.core.clock import create_origin

    # torchrun ends its processes with SIGTERM; the temporary folder must go with them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bundle = read_bundle(Path(folder))
    hosts = replace(bundle.hosts, address=head or bundle.hosts.address)
    part = find_by_name(host, {part.name: part for part in hosts.parts}, "host", where="HOST")
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) != len(part.ranks):
        sys.exit(f"host {host} has {len(part.ranks)} ranks: torchrun --nproc-per-node={len(part.ranks)} starts them")
    os.environ.update(member_environment(hosts, host, bundle.code))
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
