import fcntl
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# Tests of these assert how long something takes: while one runs, no other test does.
_TIMED = (
    "executor/transport/test_shaper.py",
    "executor/wan/test_relay.py",
    "executor/recovery/test_network_cut.py",
    "experiments/benches/test_executor_bench.py",
)

# Examples of a property that `make test` draws at most; `make test-slow` draws as many as each test says.
_FEW_EXAMPLES = 20


def pytest_xdist_auto_num_workers() -> int:
    """Run more tests than there are cores: most wait for processes and links for more than half of their time."""
    return 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    timed = {folder / part for part in _TIMED}
    every_example = os.environ.get("ROPEBRIDGE_TEST_EXAMPLES") == "all"
    for item in items:
        if item.path in timed:
            item.add_marker(pytest.mark.timed)
        # Hypothesis has no public way to lower what a test itself asks for.
        chosen = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
        if chosen is not None and not every_example and chosen.max_examples > _FEW_EXAMPLES:
            item.obj._hypothesis_internal_use_settings = settings(chosen, max_examples=_FEW_EXAMPLES)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Have a timed test wait until the other workers' tests are over, and those that come after it wait for it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return (yield)
    path = Path(tempfile.gettempdir()) / f"ropebridge-tests-{run}"
    # Every test passes the door; a timed one holds it while it waits, else others would overtake it for ever.
    with path.with_suffix(".door").open("w") as door, path.with_suffix(".room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if item.get_closest_marker("timed") else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is not None:
        for suffix in (".door", ".room"):
            (Path(tempfile.gettempdir()) / f"ropebridge-tests-{run}").with_suffix(suffix).unlink(missing_ok=True)


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Recorded data that lies beside the project and is not part of it."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"recorded data is absent: {folder}")
    return folder
