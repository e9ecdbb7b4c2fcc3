"""The sweep engine for one machine: a pool of processes, which end with the command even if the command is killed."""

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from typing import Any, TypeVar

from experiments.runs.console import STOP_SIGNALS
from experiments.sweep.points import Point
from experiments.sweep.worker import Portion, Portioner, Tally, Task, carry_out_points, one_thread_each
from traces.common.errors import RunError


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Block SIGINT in processes and threads that the block starts, since the command ends them itself."""
    # The resource tracker is started first, since its start unblocks SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Defer the signals that ask the command to end until the block has ended."""
    delayed: list[tuple[Any, ...]] = []
    handlers: dict[int, Callable[..., Any]] = {}
    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, lambda *arguments: delayed.append(arguments))
    try:
        yield
    finally:
        for kept, handler in handlers.items():
            signal.signal(kept, handler)
    for arguments in delayed:
        handlers[arguments[0]](*arguments)


Item = TypeVar("Item")
Result = TypeVar("Result")

# Most bytes in the path of the temporary folder: a socket's path has at most 107, and Python appends this name.
_LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")

# Number of portions that wait for each worker, so that workers never wait for the command.
_AHEAD = 2


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class LocalProcesses:
    """Carries out points in ``workers`` processes on this machine."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def carry_out(self, task: Task, points: Sequence[Point], *, alone: bool) -> Generator[Portion, None, None]:
        """Carry out all points; see `Engine.carry_out`.

        Raises:
            RunError: No process can be started.
        """
        if alone:
            for point in points:
                yield from self._in_pools(task, [point], 1)
        else:
            yield from self._in_pools(task, points, min(self._workers, len(points)))

    def _in_pools(self, task: Task, points: Sequence[Point], workers: int) -> Iterator[Portion]:
        """Carry out points in one pool after the other: a process that dies breaks its pool, and a new one goes on."""
        portioner = Portioner(points, workers)
        portions = iter(portioner)
        while portioner.has_more:
            # Keyed by the number of a portion's first point.
            given: dict[int, Sequence[Point]] = {}
            futures: dict[Future[Tally], int] = {}
            with process_pool(workers) as pool:
                try:
                    while given or portioner.has_more:
                        while len(given) < _AHEAD * workers and (portion := next(portions, None)) is not None:
                            given[portion[0].number] = portion
                            # Submitting may start a process, which prints errors if a signal interrupts its start.
                            with interrupts_held_back():
                                futures[pool.submit(carry_out_points, task, portion)] = portion[0].number
                        for future in wait(futures, return_when=FIRST_COMPLETED).done:
                            tally = future.result()
                            portioner.learn(tally)
                            yield Portion(given.pop(futures.pop(future)), tally)
                except BrokenProcessPool:
                    pass
            for portion in given.values():
                yield Portion(portion, None)


@contextmanager
def process_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Open a pool of processes that end at once, with what they are doing, when this block or this process ends.

    Raises:
        RunError: No process can be started.
    """
    with ExitStack() as stack:
        stack.enter_context(one_thread_each())
        context = get_context("forkserver")
        # The fork server imports these modules once for all workers.
        set_forkserver_preload(["experiments.cli.app", "experiments.sweep.worker"])
        with without_interrupts(), _room_for_sockets():
            ensure_running()
        theirs, ours = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_command, initargs=(theirs,))
        stack.callback(pool.shutdown)
        stack.callback(theirs.close)
        # Called before the pool is shut down: closing the pipe ends busy workers too.
        stack.callback(ours.close)
        try:
            with interrupts_held_back():
                first = pool.submit(os.getpid)
            first.result()
        except BrokenProcessPool:
            raise RunError("worker processes end as soon as they start; is there enough memory?") from None
        yield pool


def results_in_order(
    pool: ProcessPoolExecutor, work: Callable[[Item], Result], items: Sequence[Item]
) -> Generator[Result, None, None]:
    """Yield what ``work`` returns for each item.

    Unlike `Executor.map` this cancels no future when the caller ends: in Python 3.11 that is an error in the thread
    that notices the end of workers, so that the one which sends items to them waits for ever.
    """
    futures = [pool.submit(work, item) for item in items]
    for future in futures:
        yield future.result()


@contextmanager
def _room_for_sockets() -> Iterator[None]:
    """Let the fork server create its socket in ``/tmp`` if the path of the temporary folder is too long."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = before


def _end_with_command(command: Connection) -> None:
    """End this process as soon as the command, which holds the other end of the pipe, has ended."""
    threading.Thread(target=_await_end, args=(command,), daemon=True).start()


def _await_end(command: Connection) -> None:
    command.poll(None)
    os._exit(1)
