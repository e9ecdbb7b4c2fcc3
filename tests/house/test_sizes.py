"""Files stay small enough to be read whole."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("traces", "planner", "sim", "executor", "experiments", "ropebridge", "tests")
MOST_LINES = 500

# A longer file says why in a comment among its first lines: ``# size: <reason>``.
FIRST_LINES = 20


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_long_without_a_reason(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    without_reason = []
    for path in paths:
        lines = path.read_text().splitlines()
        reasons = [line.removeprefix("# size:").strip() for line in lines[:FIRST_LINES] if line.startswith("# size:")]
        if len(lines) > MOST_LINES and not any(reasons):
            without_reason.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
    assert not without_reason
