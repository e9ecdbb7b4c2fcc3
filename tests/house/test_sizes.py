"""Files stay small enough to be read whole, and there are not too many of them."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("traces", "planner", "sim", "executor", "experiments", "ropebridge", "tests")
PRODUCT = FOLDERS[:-1]
MOST_LINES = 500

# The product may grow by what it can do; who raises these says in the commit what the new lines do.
MOST_PRODUCT_FILES = 605
MOST_PRODUCT_LINES = 90_750

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


def test_the_product_grows_on_purpose_only() -> None:
    paths = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) <= MOST_PRODUCT_FILES
    assert sum(len(path.read_text().splitlines()) for path in paths) <= MOST_PRODUCT_LINES
