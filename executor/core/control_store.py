"""The store through which ranks and agent hear of each other: where it is, and what stands under which key."""

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from executor.core.job import JobFolder
from executor.core.json_lines import STORE_ADDRESS

_BACKLOG = 1024


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens.

    Args:
        address: Of this host, by name or number, IPv6 as well; and a port, 0 for any.

    Raises:
        OSError: This host does not have it, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family, backlog=_BACKLOG)


# A rank waits this long for an answer before it gives up; the launcher ends all ranks long before if it is gone.
STORE_TIMEOUT = timedelta(hours=1)

# Set when all have done all steps.
OVER = "over"

# Second 0 of the run, a reading of the clock of the machine that has the agent.
ORIGIN = "origin"


def open_store(address: tuple[str, int], patience: timedelta = STORE_TIMEOUT) -> TCPStore:
    """Return a new store that this process holds, reached at an address and nowhere else; port 0 is any."""
    # Left to itself the store would listen on every interface of the machine.
    with listen(address) as listening:
        host, port, *_ = listening.getsockname()
        descriptor = listening.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=descriptor)


def announce_store(host: str, port: int) -> None:
    """Tell the processes that this one starts where the store of their job is."""
    os.environ[STORE_ADDRESS] = f"{host}:{port}"


def store_address() -> tuple[str, int]:
    """Return host and port of the store of this rank's job."""
    host, _, port = os.environ[STORE_ADDRESS].rpartition(":")
    return host, int(port)


def reach_control_store(address: tuple[str, int]) -> TCPStore:
    """Return the store at an address; a client that waits holds its connection, so each thread has one."""
    return TCPStore(*address, is_master=False, timeout=STORE_TIMEOUT)


def telemetry_key(generation: int, step: int, rank: int) -> str:
    """Return where a rank publishes what happened in a step."""
    return f"events/{generation}/{step}/{rank}"


def plan_key(generation: int, step: int) -> str:
    """Return where the ranks find the plan of a step, or that their generation is over."""
    return f"plan/{generation}/{step}"


def trouble_key(generation: int) -> str:
    """Return where a rank says that it has lost a connection."""
    return f"trouble/{generation}"


def report_key(generation: int, rank: int) -> str:
    """Return where a rank says what it has when a generation is over."""
    return f"report/{generation}/{rank}"


def beginning_key(generation: int) -> str:
    """Return where the ranks find with what a generation begins."""
    return f"beginning/{generation}"


def ready_key(rank: int, incarnation: int) -> str:
    """Return where a rank's process says that it can train."""
    return f"ready/{rank}/{incarnation}"


def invitation_key(rank: int, incarnation: int) -> str:
    """Return where a process that has come later finds the number of its first generation."""
    return f"invitation/{rank}/{incarnation}"


def done_key(generation: int, rank: int) -> str:
    """Return where a rank says that it has done all steps and written what they left."""
    return f"done/{generation}/{rank}"


_PIECE_BYTES = 4 << 20
# Pieces that lie in the store at a time.
_AHEAD = 4
_PAUSE_S = 0.005


def upload_results(store: TCPStore, job: JobFolder, rank: int) -> None:
    """Send all files that a rank has left in its own folder of the job."""
    paths = [path for path in job.left(rank) if path.exists()]
    store.set(_list_key(rank), json.dumps([path.name for path in paths]))
    for path in paths:
        with path.open("rb") as file:
            number, piece = 1, b"all but the end"
            while piece:
                piece = file.read(_PIECE_BYTES)
                while number > _AHEAD and store.check([_piece_key(path, number - _AHEAD)]):
                    time.sleep(_PAUSE_S)
                # What holds any bytes is typed as text.
                store.set(_piece_key(path, number), piece)  # type: ignore[arg-type]
                number += 1


def collect(store: TCPStore, job: JobFolder, rank: int, is_there: Callable[[], bool]) -> bool:
    """Write the files that a rank hands over into the head's folder of the job; return whether all came.

    Args:
        store: Of the job.
        job: Its folder on the head.
        rank: Whose.
        is_there: Whether the rank's machine still is.
    """
    if not _await(store, _list_key(rank), is_there):
        return False
    for name in json.loads(store.get(_list_key(rank))):
        # Whatever it is called there, here it lies in the job's folder.
        path = job.path / Path(name).name
        beside, number = path.with_suffix(".part"), 1
        with beside.open("wb") as file:
            while _await(store, key := _piece_key(path, number), is_there):
                piece = store.get(key)
                store.delete_key(key)
                if not piece:
                    break
                file.write(piece)
                number += 1
            else:
                return False
        beside.rename(path)
    return True


def _await(store: TCPStore, key: str, is_there: Callable[[], bool]) -> bool:
    """Wait for a key, for as long as who sets it is there."""
    while not store.check([key]):
        if not is_there():
            # It may have been set just before.
            return bool(store.check([key]))
        time.sleep(_PAUSE_S)
    return True


def _list_key(rank: int) -> str:
    return f"left/{rank}"


def _piece_key(path: Path, number: int) -> str:
    return f"left/{path.name}/{number}"
