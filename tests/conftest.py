from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Recorded data that lies beside the project and is not part of it."""
    folder = Path(__file__).parents[1].parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"recorded data is absent: {folder}")
    return folder
