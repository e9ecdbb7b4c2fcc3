"""The pool of processes in which sweeps and benches work."""

import os
import signal
import threading
import time

import pytest

from experiments.sweep.engines.local import process_pool, results_in_order
from tests.helpers.processes.process_watch import wait_until


def first_at_once(item: bytes) -> int:
    """What a worker does: it answers the first item, and then computes for long."""
    until_s = time.monotonic() + 20 * item[0]
    while time.monotonic() < until_s:
        pass
    return len(item)


def test_a_pool_ends_while_items_wait_that_fill_a_pipe() -> None:
    def feeders() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "QueueFeeder" in thread.name]

    def await_all() -> None:
        items = [bytes([number > 0]) + bytes(300_000) for number in range(24)]
        with process_pool(1) as pool:
            for _ in results_in_order(pool, first_at_once, items):
                threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()

    before = len(feeders())
    with pytest.raises(KeyboardInterrupt):
        await_all()
    wait_until(lambda: len(feeders()) == before, "the thread that sends items has not ended")
