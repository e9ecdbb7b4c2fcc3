"""Runs a command in a network of its own: ``python -m executor.wan.isolated PARENT_PID COMMAND...``.

How TCP is set in the network that it leaves is in the command's environment, see `executor.wan.tcp_settings.HOST_TCP`.
The command replaces this process, which has a single thread, as the kernel asks of whoever makes a user namespace.
"""

import json
import os
import sys

from executor.core.subprocesses import die_with_parent
from executor.wan.linux import isolate, switch_on_loopback
from executor.wan.tcp_settings import HOST_TCP, read_tcp


def main(parent: str, *command: str) -> None:
    """Isolate this process and become ``command``."""
    os.environ[HOST_TCP] = json.dumps(read_tcp())
    isolate()
    # After the change of namespace, which may make the kernel forget it; it outlives what follows.
    die_with_parent(int(parent))
    switch_on_loopback()
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
