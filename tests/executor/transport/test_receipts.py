"""What happens to a receipt in a thread that nobody waits for is told to who can end the rank."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import cast

import pytest
import torch
import torch.distributed as dist

from executor.core.clock import RunClock
from executor.core.failures import PeerLostError
from executor.transport.receive import RecvHandle

PATIENCE_S = 5.0


class Receive:
    """A receive that ends at once; badly, if there is an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self, patience: timedelta) -> None:
        if self._error is not None:
            raise self._error


def watched(receive: Receive, arrived_error: Exception | None = None) -> tuple[RecvHandle, list[Exception]]:
    """A receipt that a thread has settled, and what was told of that."""
    failures, over = list[Exception](), threading.Event()

    def arrived(_: RecvHandle) -> None:
        if arrived_error is not None:
            raise arrived_error
        over.set()

    def failed(error: Exception) -> None:
        failures.append(error)
        over.set()

    receipt = RecvHandle(torch.empty(1, dtype=torch.uint8), [cast(dist.Work, receive)], "peer", RunClock(0.0), arrived)
    with ThreadPoolExecutor(1) as threads:
        receipt.watch(threads, failed)
        assert over.wait(PATIENCE_S), "nobody is told"
    return receipt, failures


def test_nothing_is_told_of_what_goes_well() -> None:
    receipt, failures = watched(Receive())
    assert failures == []
    assert receipt.wait().numel() == 1


def test_an_error_of_who_hears_of_the_arrival_is_told() -> None:
    error = RuntimeError("can't start new thread")
    assert watched(Receive(), error)[1] == [error]


def test_an_error_that_is_not_the_sender_s_is_told() -> None:
    error = ZeroDivisionError("by nought")
    assert watched(Receive(error))[1] == [error]


def test_a_lost_sender_is_told_to_who_waits_for_it() -> None:
    receipt, failures = watched(Receive(RuntimeError("closed")))
    assert failures == []
    with pytest.raises(PeerLostError, match="lost the connection to device 'peer': closed"):
        receipt.wait()
