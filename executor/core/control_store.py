"""The store through which ranks and agent hear of each other: where it is, and what stands under which key."""

import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from executor.core.json_lines import STORE_ADDRESS
from executor.core.listening import listen

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
