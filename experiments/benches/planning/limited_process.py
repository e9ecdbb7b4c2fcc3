"""A process of its own for work that may take too long: it is killed at the limit and another one takes its place."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Generic, Self, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

# Nothing is inherited: a forked process would hold locks of threads that it does not have.
_CONTEXT = multiprocessing.get_context("spawn")


class LimitedProcess(Generic[Task, Result]):
    """Carries out tasks one after the other in another process, as a context manager.

    Args:
        work: From a task to its result; a function of a module, as tasks and results travel between processes.
    """

    def __init__(self, work: Callable[[Task], Result]) -> None:
        self._work = work

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def result(self, task: Task, limit_s: float) -> Result:
        """Return what the work makes of a task.

        Args:
            task: What to do.
            limit_s: Time limit in seconds; the first task's also pay for the start of the process.

        Raises:
            TimeoutError: It takes longer than the limit.
            ChildProcessError: The process ended before it was done; what it wrote says why.
        """
        self._ours.send(task)
        try:
            if self._ours.poll(limit_s):
                result: Result = self._ours.recv()
                return result
            problem: OSError = TimeoutError(f"over {limit_s:g} s")
        except EOFError:
            problem = ChildProcessError("its process ended")
        self._stop()
        self._start()
        raise problem

    def _start(self) -> None:
        self._ours, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, self._work), daemon=True)
        self._process.start()
        theirs.close()

    def _stop(self) -> None:
        self._ours.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _serve(connection: Connection, work: Callable[[Task], Result]) -> None:
    try:
        while True:
            connection.send(work(connection.recv()))
    except EOFError:
        return
