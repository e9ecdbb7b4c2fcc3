from pathlib import Path

import pytest

# Tests of these start processes that train over real sockets: several at a time would wait for each other's turns.
_REAL = (
    "contract",
    "executor",
    "experiments/test_command.py",
    "experiments/test_executed.py",
    "experiments/test_executor_bench.py",
    "experiments/test_interrupts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(folder / part) for part in _REAL):
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Recorded data that lies beside the project and is not part of it."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"recorded data is absent: {folder}")
    return folder
