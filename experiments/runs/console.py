"""The command's output (results on standard output, all else on standard error), its interrupts, its output files."""

import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Never

from traces.common.atomic import check_place
from traces.common.errors import InputError, InterruptError, RunError


def say(text: str) -> None:
    """Print results.

    Raises:
        RunError: The results cannot be written, to a full disk for example. Typer handles a closed pipe.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # Otherwise the interpreter would flush standard output again at exit, and print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise RunError(f"the results cannot be written to the standard output: {error.strerror}") from error


def tell(line: str) -> None:
    """Print a line about progress or errors on the standard error; one that is closed or full changes nothing else."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


# Seconds of compiling after which a command says why it takes so long.
_SILENT_S = 2.0


def tell_of_compiling() -> None:
    """Have a line printed, once, if numba compiles functions for longer than `_SILENT_S`: in the first commands."""
    from numba.core import event

    class Watch(event.Listener):
        def __init__(self) -> None:
            self._depth, self._began_s, self._spent_s, self._is_told = 0, 0.0, 0.0, False

        def on_start(self, _: Any) -> None:
            now_s = time.monotonic()
            self._began_s = self._began_s if self._depth else now_s
            self._depth += 1
            if self._spent_s + now_s - self._began_s > _SILENT_S and not self._is_told:
                self._is_told = True
                tell("compiling the planner and the simulator for this machine; later commands find this done")

        def on_end(self, _: Any) -> None:
            self._depth -= 1
            self._spent_s += 0.0 if self._depth else time.monotonic() - self._began_s

    event.register("numba:compile", Watch())  # type: ignore[no-untyped-call]


def printable(text: str) -> str:
    """Return a text as one line, in which characters that a terminal obeys are escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of equally many cells as lines of text, whose columns begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# Signals that ask a command to end.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CommandInterruptedError(InterruptError):
    """Raised when a signal asks the command to end."""


def raise_when_interrupted() -> None:
    """Make the signals that ask the command to end raise `CommandInterruptedError`.

    Signals that were inherited as ignored stay ignored, as set by ``nohup`` and by shells for background jobs.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> Never:
    """Raise CommandInterruptedError, so that all that was started is ended; ignore further signals meanwhile."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise CommandInterruptedError


def check_targets(paths: Iterable[Path | None]) -> None:
    """Check that files can be written; None stands for no file.

    Raises:
        InputError: A path is a folder, its folder is missing, or nothing can be written there.
    """
    for path in paths:
        if path is None:
            continue
        check_place(path)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            problem = f"the folder '{path.parent}' is not writable"
            raise InputError(problem, where=str(path), valid="choose a file in another folder")
