"""The command `ropebridge`, as tests call it: in this process where that makes no difference, else in its own."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from experiments.cli.app import main
from experiments.runs.console import STOP_SIGNALS

COMMAND = [str(Path(sys.executable).with_name("ropebridge"))]


def ropebridge(
    *arguments: object, cwd: Path | None = None, terminal: TextIO | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, in this process: a process for each of hundreds of calls takes minutes.

    What it says, as opposed to its results, goes to ``terminal`` if there is one.
    """
    return _in_this_process([*map(str, arguments)], cwd, terminal)


def ropebridge_process(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end in a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, cwd=cwd, check=False
    )


def _in_this_process(
    arguments: list[str], cwd: Path | None, terminal: TextIO | None
) -> subprocess.CompletedProcess[str]:
    output, errors = _text(), _text()
    with _restored(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(terminal or errors):
        sys.argv = [COMMAND[0], *arguments]
        if cwd is not None:
            os.chdir(cwd)
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            # As Python ends a process: the tests of messages refuse tracebacks.
            traceback.print_exc()
            status = 1
    return subprocess.CompletedProcess(arguments, status, _written(output), _written(errors))


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Give the block's process back as it was: folder, arguments and handlers of signals."""
    folder, arguments = Path.cwd(), sys.argv
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv = arguments
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _text() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _written(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()
