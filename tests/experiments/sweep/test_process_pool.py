"""The pool of processes in which sweeps and benches work."""

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from experiments.sweep.engines.local import process_pool, results_in_order
from tests.helpers.processes.process_watch import wait_until


def first_at_once(item: bytes) -> int:
    """What a worker does: it answers the first item, and then computes for long."""
    until_s = time.monotonic() + 20 * item[0]
    while time.monotonic() < until_s:
        pass
    return len(item)


def test_a_pool_ends_while_items_wait_that_fill_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled items would be an error of the thread that notices the end of workers, at some times of that end."""

    def feeders() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "QueueFeeder" in thread.name]

    items = [bytes([number > 0]) + bytes(300_000) for number in range(24)]
    before, submitted = len(feeders()), list[Future[int]]()
    with process_pool(1) as pool:
        submit = pool.submit

        def noted(*arguments: Any) -> "Future[int]":
            submitted.append(submit(*arguments))
            return submitted[-1]

        monkeypatch.setattr(pool, "submit", noted)
        results = results_in_order(pool, first_at_once, items)
        assert next(results) == len(items[0])
        results.close()
    wait_until(lambda: len(feeders()) == before, "the thread that sends items has not ended")
    assert len(submitted) == len(items)
    assert not any(future.cancelled() for future in submitted)
