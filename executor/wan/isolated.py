"""Runs a command in a network of its own: ``python -m executor.wan.isolated PARENT_PID COMMAND...``.

The command replaces this process, which has a single thread, as the kernel asks of whoever makes a user namespace.
"""

import os
import sys

from executor.parent import die_with_parent
from executor.wan.namespaces import isolate
from executor.wan.tun import switch_on_loopback


def main(parent: str, *command: str) -> None:
    """Isolate this process and become ``command``."""
    isolate()
    # After the change of namespace, which may make the kernel forget it; it outlives what follows.
    die_with_parent(int(parent))
    switch_on_loopback()
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
