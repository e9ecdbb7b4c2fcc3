"""Errors of a receive that a background thread waits for are reported."""

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

TIMEOUT_S = 5.0


class Receive:
    """A receive that ends at once; badly, if there is an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        if self._error is not None:
            raise self._error


def waited(receive: Receive, arrived_error: Exception | None = None) -> tuple[RecvHandle, list[Exception]]:
    """A handle that a background thread has completed, and the errors that it reported."""
    failures, over = list[Exception](), threading.Event()

    def arrived(_: RecvHandle) -> None:
        if arrived_error is not None:
            raise arrived_error
        over.set()

    def failed(error: Exception) -> None:
        failures.append(error)
        over.set()

    handle = RecvHandle(
        torch.empty(1, dtype=torch.uint8), 1, [cast(dist.Work, receive)], "peer", RunClock(0.0), arrived
    )
    with ThreadPoolExecutor(1) as threads:
        handle.wait_in_background(threads, failed)
        assert over.wait(TIMEOUT_S), "nothing is reported"
    return handle, failures


def test_nothing_is_told_of_what_goes_well() -> None:
    handle, failures = waited(Receive())
    assert failures == []
    assert handle.wait().numel() == 1


def test_an_error_of_who_hears_of_the_arrival_is_told() -> None:
    error = RuntimeError("can't start new thread")
    assert waited(Receive(), error)[1] == [error]


def test_an_error_that_is_not_the_sender_s_is_told() -> None:
    error = ZeroDivisionError("by nought")
    assert waited(Receive(error))[1] == [error]


def test_a_lost_sender_is_told_to_who_waits_for_it() -> None:
    handle, failures = waited(Receive(RuntimeError("closed")))
    assert failures == []
    with pytest.raises(PeerLostError, match="lost the connection to device 'peer': closed"):
        handle.wait()
