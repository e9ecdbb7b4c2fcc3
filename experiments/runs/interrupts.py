"""Ctrl-C, a polite kill and a closed terminal: the command ends, and what it started with it."""

import signal
from types import FrameType
from typing import Never

# What asks a command to end.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CommandInterruptedError(BaseException):
    """Somebody wants the command to end; nothing in between may take it for an error of its own."""


def raise_when_interrupted() -> None:
    """Have the signals that ask a command to end raise `CommandInterruptedError` in it.

    Those that it inherited as ignored stay so: ``nohup`` asks for that, and shells do where a job is in the background.
    """
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> Never:
    """Unwind the stack, so that everything that was started is ended on the way, and not interrupted in that."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise CommandInterruptedError
