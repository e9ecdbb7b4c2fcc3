"""Processes that compute with one thread each: workers share the cores as whole processes."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_VARIABLES: Mapping[str, str] = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Have the processes that are started in here compute with one thread."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(_VARIABLES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
