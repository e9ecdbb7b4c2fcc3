import fcntl
import gc
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from executor.control import node_agent
from experiments.cli.app import COLLECTIONS
from tests.helpers.processes.warm_agents import WarmAgents

# Four workers share two cores: with threads of its own, each would make the others wait. Read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test asks for more, threads that wait would spin on the cores that other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Nothing that is loaded for the tests, torch among it, is garbage before they end (see `pytest_collection_finish`).
gc.disable()

# Examples have no deadline, and may be slow to draw: any other process of the machine can delay them.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Examples of a property that `make test` draws at most, always the same ones: a change is judged by what it changes.
# `make test-slow` draws as many as each test says, other ones each time.
_FEW_EXAMPLES = 5

# Limit of a test that `make test-slow` runs, seconds; pyproject.toml has that of the others.
_LONGEST_SLOW_S = 7200


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start four workers for two cores: many tests wait for processes and messages."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Have a worker run all timed tests of a file; xdist reads the groups after this."""
    if is_timed(item):
        # Those of one file have fixtures in common.
        item.add_marker(pytest.mark.xdist_group(f"timed-{item.path.stem}"))
    if item.get_closest_marker("slow") is not None:
        item.add_marker(pytest.mark.timeout(_LONGEST_SLOW_S))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # All groups of timed tests begin at the same time.
    items.sort(key=is_timed, reverse=True)
    every_example = os.environ.get("ROPEBRIDGE_TEST_EXAMPLES") == "all"
    for item in items:
        # Hypothesis has no public way to lower what a test itself asks for.
        chosen = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
        if chosen is not None and not every_example:
            few = settings(chosen, max_examples=min(chosen.max_examples, _FEW_EXAMPLES), derandomize=True)
            item.obj._hypothesis_internal_use_settings = few


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but without a look at the million objects of modules and tests."""
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
    gc.enable()


def is_timed(item: pytest.Item) -> bool:
    """Whether the test asserts how long something takes."""
    return item.get_closest_marker("timed") is not None


_LOCKS = pytest.StashKey[ExitStack]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Have timed tests wait until all others are over, and those that come after them wait for them."""
    run, stash = os.environ.get("PYTEST_XDIST_TESTRUNUID"), item.config.stash
    if run is None:
        return (yield)
    if stash.get(_LOCKS, None) is None:
        stash[_LOCKS] = entered(Path(tempfile.gettempdir()) / f"ropebridge-tests-{run}", timed=is_timed(item))
    try:
        return (yield)
    finally:
        if not (is_timed(item) and nextitem is not None and is_timed(nextitem)):
            stash[_LOCKS].close()
            del stash[_LOCKS]


def entered(path: Path, *, timed: bool) -> ExitStack:
    """Wait until no test of the other kind runs, timed or not; closing the result lets those in.

    Timed tests mostly wait, and run beside each other.
    """
    own, other = (".timed", ".untimed") if timed else (".untimed", ".timed")
    with ExitStack() as stack:
        room = stack.enter_context(path.with_suffix(own).open("w"))
        # Every test passes the door; one that waits holds it, else those of the other kind would go on for ever.
        with path.with_suffix(".door").open("w") as door, path.with_suffix(other).open("w") as others:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(others, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_SH)
        return stack.pop_all()


def pytest_sessionfinish(session: pytest.Session) -> None:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is not None:
        for suffix in (".door", ".timed", ".untimed"):
            (Path(tempfile.gettempdir()) / f"ropebridge-tests-{run}").with_suffix(suffix).unlink(missing_ok=True)


@pytest.fixture(scope="session", autouse=True)
def warm_agents() -> Iterator[None]:
    """Fork the agents of runs that a test starts itself; `ropebridge_process` starts new interpreters."""
    with pytest.MonkeyPatch.context() as patch, WarmAgents() as agents:
        patch.setattr(node_agent, "start_agent", agents.start_agent)
        yield


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Recorded data that lies beside the project and is not part of it."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"recorded data is absent: {folder}")
    return folder
