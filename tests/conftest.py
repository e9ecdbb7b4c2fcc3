from pathlib import Path

import pytest

# Tests of these start processes that train over real sockets: several at a time would wait for each other's turns.
_REAL = (
    "contract",
    "executor",
    "experiments/cli/test_command.py",
    "experiments/reproductions/test_executed.py",
    "experiments/benches/test_executor_bench.py",
    "experiments/runs/test_interrupts.py",
)

# Of these, what comes out whenever things happen, or starts no process: several at a time do no harm.
_TIMELESS = (
    "executor/transport/test_compression.py",
    "executor/runtime/test_correctness_matrix.py",
    "executor/training/test_data_order.py",
    "executor/training/test_real_compute.py",
    "executor/training/test_real_compute_rows.py",
    "executor/training/test_tensor_parallel.py",
    "executor/runtime/test_training_equality.py",
    "executor/training/test_weight_store.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if any(item.path.is_relative_to(folder / part) for part in _REAL) and not any(
            item.path == folder / part for part in _TIMELESS
        ):
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Recorded data that lies beside the project and is not part of it."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"recorded data is absent: {folder}")
    return folder
