"""Signals that ask the command to end, kept from those that are not to hear them, or kept for a moment."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from experiments.runs.interrupts import STOP_SIGNALS


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Have processes and threads that are started in here never get SIGINT: the command ends them."""
    # It would let the signal through again when it is started.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Do what is done in here to its end, and let signals that have come in the meantime act then."""
    held: list[tuple[Any, ...]] = []
    handlers: dict[int, Callable[..., Any]] = {}
    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        for kept, handler in handlers.items():
            signal.signal(kept, handler)
    for arguments in held:
        handlers[arguments[0]](*arguments)
