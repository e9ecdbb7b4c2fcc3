"""The threads of a connection end with the session, even if gloo never completes a send."""

import multiprocessing
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from executor.core.timeouts import timeouts
from executor.transport.connection import Connection, Message

# Far longer than a connection may take to end, far shorter than gloo waits for the peer.
LIMIT_S = 20.0


def sender(store: Path, is_over: "multiprocessing.synchronize.Event") -> None:
    """Send a message, which the peer never accepts, and another one, and abandon the connection."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2, timeout=timedelta(minutes=5))
    failures = list[Exception]()
    group = dist.group.WORLD
    assert group is not None
    connection = Connection("peer", RunClock(0.0), failures.append, 1, group)
    for tag in (1, 2):
        connection.send(Message(torch.zeros(1 << 20, dtype=torch.uint8), tag, 0.0, lambda departed_s: None))
    while threading.active_count() < 3 or connection._outbox.qsize():
        time.sleep(0.01)
    begun_s = time.monotonic()
    connection.abandon()
    connection.close()
    assert time.monotonic() - begun_s < 2 * timeouts().abandon_s + 1.0
    assert failures == []
    is_over.set()


def silent_peer(store: Path, is_over: "multiprocessing.synchronize.Event") -> None:
    """Connect, and post no receive."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2, timeout=timedelta(minutes=5))
    is_over.wait()


@pytest.mark.slow
def test_a_connection_is_abandoned_while_gloo_waits_for_the_peer(tmp_path: Path) -> None:
    spawned = multiprocessing.get_context("spawn")
    is_over = spawned.Event()
    store = tmp_path / "store"
    processes = [spawned.Process(target=main, args=(store, is_over)) for main in (sender, silent_peer)]
    for process in processes:
        process.start()
    try:
        assert is_over.wait(LIMIT_S)
    finally:
        for process in processes:
            process.terminate()
            process.join()
