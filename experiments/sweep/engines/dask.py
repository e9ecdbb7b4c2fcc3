"""The sweep engine for a Dask cluster, whose workers must share the sweep's folder and files."""

import logging
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

from experiments.sweep.engines.local import without_interrupts
from experiments.sweep.points import Point
from experiments.sweep.worker import Portion, Portioner, Tally, Task, carry_out_points, one_thread_each
from traces.common.errors import InputError, RunError

# Number of portions that wait in the queue of each worker.
_AHEAD = 2


class DaskTasks:
    """Carries out points as tasks of Dask, on ``workers`` processes.

    The tasks go to the cluster that Dask's setting ``scheduler-address`` (environment variable
    ``DASK_SCHEDULER_ADDRESS``) names; if it is not set, a cluster is started on this machine.

    Raises:
        InputError: Dask is not installed.
    """

    def __init__(self, workers: int) -> None:
        try:
            import distributed  # noqa: F401 - imported here so that a missing package is reported before anything has begun
        except ModuleNotFoundError:
            raise InputError(
                "dask.distributed is not installed", where="--engine dask", valid="pip install 'ropebridge[dask]'"
            ) from None
        self._workers = workers

    def carry_out(self, task: Task, points: Sequence[Point], *, alone: bool) -> Generator[Portion, None, None]:
        """Carry out all points; see `Engine.carry_out`."""
        with _client(1 if alone else self._workers) as client:
            if alone:
                for point in points:
                    yield from _tasks(client, task, [point], 1)
            else:
                yield from _tasks(client, task, points, self._workers)


def _tasks(client: Any, task: Task, points: Sequence[Point], workers: int) -> Iterator[Portion]:
    # joblib is not used: its backend for Dask waits forever after a task has killed its workers.
    from distributed import as_completed

    portioner = Portioner(points, workers)
    portions = iter(portioner)
    under_way: dict[Any, Sequence[Point]] = {}
    completed = as_completed()

    def submit() -> None:
        while len(under_way) < _AHEAD * workers and (portion := next(portions, None)) is not None:
            future = client.submit(carry_out_points, task, portion, pure=False)
            under_way[future] = portion
            completed.add(future)

    submit()
    while under_way:
        future = next(completed)
        portion, tally = under_way.pop(future), _tally(future)
        if tally is not None:
            portioner.learn(tally)
        submit()
        yield Portion(portion, tally)


def _tally(future: Any) -> Tally | None:
    """Return a worker's report; None if the worker died or left the cluster."""
    from distributed import KilledWorker

    try:
        tally: Tally = future.result()
    except KilledWorker:
        return None
    except (OSError, CancelledError) as error:
        raise RunError(f"Dask's scheduler is gone: {error}; call the same command again when it is back") from error
    return tally


@contextmanager
def _client(workers: int) -> Iterator[Any]:
    import dask
    from distributed import Client, LocalCluster

    address = dask.config.get("scheduler-address", None)
    if address is not None:
        try:
            reached = Client(address)
        except (OSError, ValueError) as error:
            raise InputError(
                f"Dask's scheduler at '{address}' is out of reach: {error}",
                where="DASK_SCHEDULER_ADDRESS",
                valid="start it, or unset this for a cluster on this machine",
            ) from error
        with reached as client:
            yield client
        return
    # Dask must not repeat a task that killed its worker: the sweep does.
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}), one_thread_each():
        with without_interrupts():
            cluster = LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
            )
        with cluster, Client(cluster) as client:
            yield client
