"""What a stranger does who reaches a job's ports: as another user of the machine if the tests may become one.

The process of `attack` writes what it has heard as JSON to its standard output.
"""

# Python loads it with the first address, when this process may be unable to read it.
import encodings.idna  # noqa: F401
import json
import os
import socket
import sys
import tempfile
from collections.abc import Collection
from contextlib import ExitStack, suppress

from executor.core.tls import TlsEnd
from experiments.benches.faults.strangers import NOBODY, WAYS, Place, become_nobody

IDLE = 300
HALF_OPEN = 100

# Long enough for loopback: connections to gloo get no answer at all.
_CONNECT_S = 0.3


def attack(places: Collection[Place], files: Collection[str], processes: Collection[int]) -> None:
    """Try all ways at all places, while idle and half-open connections wait; then signals, and the job's files.

    Args:
        places: Where the job listens.
        files: The job's files.
        processes: The job's processes.
    """
    # Those that pytest captures go nowhere.
    sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115
    become_nobody()
    tempfile.tempdir = "/tmp"
    heard: dict[str, list[str]] = {name: [] for name in WAYS}
    with ExitStack() as stack:
        hello = TlsEnd(b"guess", is_server=False).begin()
        open_places = [place for place in places if _connected(place, stack) is not None]
        for place in open_places:
            for number in range(IDLE + HALF_OPEN):
                connection = _connected(place, stack)
                if number >= IDLE and connection is not None:
                    with suppress(OSError):
                        connection.sendall(hello)
            for name, way in WAYS.items():
                heard[name].append(way(place).hex())
    reached = []
    if os.geteuid() == NOBODY:
        for process in processes:
            with suppress(PermissionError):
                os.kill(process, 0)
                reached.append(process)
    read = [path for path in files if os.geteuid() == NOBODY and os.access(path, os.R_OK)]
    print(json.dumps({"heard": heard, "open": open_places, "signalled": reached, "read": read}), flush=True)


def _connected(place: Place, stack: ExitStack) -> socket.socket | None:
    try:
        return stack.enter_context(socket.create_connection(place, timeout=_CONNECT_S))
    except OSError:
        return None
