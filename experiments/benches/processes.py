"""The processes of a run, found by an environment variable that they inherit, and what a run has left behind."""

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

# Environment variable whose value marks the processes of one run.
MARK = "ROPEBRIDGE_MARK"

# What the command line of a process of the run says about its part in it.
_PROGRAMS = {"executor.wan.relay": "relay", "executor.control.node_agent": "agent"}

# Longest time for which processes may outlive the command that has started them.
_ENDING_S = 15.0


def marked_processes(mark: str) -> dict[int, str]:
    """Return the command lines of the processes that have inherited a mark, by their ids."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                # A rank is forked from its agent, and has that one's command line.
                forked = (folder / "comm").read_text().startswith("rank ")
                found[int(folder.name)] = "python -m executor.rank.worker " if forked else command
    return found


def parts_of_run(mark: str) -> dict[str, int]:
    """Return the process ids of the head's ``agent``, the ``relay`` and each ``rank N`` of a marked run."""
    found = {}
    for pid, command in marked_processes(mark).items():
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if not name.startswith("rank "):
                name = next((part for module, part in _PROGRAMS.items() if f"-m {module} " in command), "")
            if name:
                found[name] = pid
    return found


def fill_disk(mark: str) -> None:
    """Let no process of a marked run write to a file from now on, as on a full disk."""
    _limit_files(mark, is_full=True)


def make_room(mark: str) -> None:
    """Let the processes of a marked run write to files again."""
    _limit_files(mark, is_full=False)


def _limit_files(mark: str, *, is_full: bool) -> None:
    for pid in marked_processes(mark):
        with suppress(OSError, ValueError):
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0 if is_full else most, most))


def await_end(mark: str) -> list[str]:
    """Wait for the end of all processes of a marked run; kill those that stay, and return their command lines."""
    end_s = time.monotonic() + _ENDING_S
    while (left := marked_processes(mark)) and time.monotonic() < end_s:
        time.sleep(0.05)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return list(left.values())


def networks() -> Mapping[str, frozenset[str]]:
    """Return the network interfaces of this process's namespace, and the namespaces that have names."""
    return {place: _entries(Path(place)) for place in ("/sys/class/net", "/run/netns")}


def _entries(folder: Path) -> frozenset[str]:
    return frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()


def places_listened_at(mark: str) -> set[tuple[str, int]]:
    """Return where marked processes wait for connections: IPv4 addresses, IPv6 ones as in the kernel's table; ports."""
    held = {link for pid in marked_processes(mark) for link in _sockets_of(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in held:
                host, _, port = fields[1].partition(":")
                address = socket.inet_ntoa(bytes.fromhex(host)[::-1]) if table == "tcp" else host
                found.add((address, int(port, 16)))
    return found


_LISTENING = "0A"


def _sockets_of(pid: int) -> Iterator[str]:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for link in links:
        with suppress(OSError):
            yield os.readlink(link)
