"""Prints the lines of each package and its longest files: size is watched."""

from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]

for folder in ("traces", "planner", "sim", "executor", "experiments", "ropebridge", "tests"):
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    longest = max(lines, key=lambda path: lines[path])
    print(
        f"{folder:<12} {len(lines):>3} files, {sum(lines.values()):>5} lines, median {median(lines.values()):>5.0f}, "
        f"longest {longest.relative_to(ROOT)} ({lines[longest]})"
    )
