"""Watches that a command leaves no process behind, whatever happens to it."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from experiments.benches.processes import MARK, marked_processes, places_listened_at
from tests.helpers.processes.command import COMMAND

PATIENCE_S = 60.0


def processes_of(module: str, mark: str) -> list[int]:
    """Marked processes that run a module of ours."""
    return sorted(pid for pid, command in marked_processes(mark).items() if f"-m {module} " in command)


def wait_until(condition: Callable[[], object], what: str, pause_s: float = 0.05) -> None:
    """Ask again and again, with pauses: longer ones for what takes both ends processor time to answer."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(pause_s)


def _hear_signals() -> None:
    """The command leaves alone what it inherits as ignored, and pytest may have been started in the background."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def started(arguments: list[str], tmp_path: Path) -> AbstractContextManager[tuple["subprocess.Popen[str]", str]]:
    """The command under way in a temporary folder of its own, which must be empty when everything has ended."""
    return started_process([*COMMAND, *arguments], tmp_path)


@contextmanager
def started_process(command: Sequence[str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Any command likewise."""
    mark = uuid.uuid4().hex
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, MARK: mark, "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_signals,
    )
    try:
        yield process, mark
        wait_until(lambda: not marked_processes(mark), "processes stay behind")
    finally:
        process.kill()
        process.communicate()
        for pid in marked_processes(mark):
            os.kill(pid, signal.SIGKILL)


def left_behind(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "scratch").iterdir())


def addresses_listened_at(mark: str) -> set[str]:
    """Where marked processes wait for connections: IPv4 addresses, and IPv6 ones as the kernel's table has them."""
    return {address for address, _ in places_listened_at(mark)}
