"""Commands for people who start processes by hand, or with a tool of their own."""

import shlex
from collections.abc import Mapping

from executor.deploy.deployment import Deployment
from executor.deploy.target import Target


def files(deployment: Deployment) -> Mapping[str, str]:
    """Return the commands, one for each host, the head's first."""
    text = (
        f"# The job '{deployment.name}': copy the folder 'job' to every host, and run there, in any order within\n"
        f"# {deployment.hosts.arrival_s:.0f} s, what stands below its name. Every host but the head starts its ranks\n"
        "# by torchrun, alone: a host that is lost must not take the others with it.\n"
    )
    if deployment.secrets:
        text += f"# Set these before, from where you keep secrets: {', '.join(deployment.secrets)}\n"
    for part in deployment.hosts.parts:
        text += f"\n# --- {part.name}\n. job/environment.sh\n"
        if part.name == deployment.hosts.head:
            text += f"{deployment.command(part.name, 'job')}\n"
        else:
            count = len(part.ranks)
            # A rendezvous in a file: torchrun's own would listen on every interface, for nobody.
            text += (
                "rm -f job/rendezvous\nTORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend=c10d "
                "--rdzv-conf=store_type=file --rdzv-endpoint=job/rendezvous --nnodes=1 "
                f"--nproc-per-node={count} -m executor.deploy.join_torchrun job {shlex.quote(part.name)}\n"
            )
    return {"commands.sh": text}


TORCHRUN = Target("torchrun", files)
