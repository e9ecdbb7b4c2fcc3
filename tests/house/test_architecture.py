"""What docs/architecture.md says of calls and files is so."""

import ast
import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()

# The most files from the command to the line that moves the bytes.
MOST_FILES = 8


def chains() -> list[list[tuple[str, str]]]:
    """Each numbered list of the page: files with what is called in them."""
    found: list[list[tuple[str, str]]] = []
    for line in ARCHITECTURE.splitlines():
        item = re.match(r"\d+\. (\S+\.py) `([\w.]+)`", line)
        if item is None:
            found.append([])
        else:
            found[-1].append((item[1], item[2]))
    return [chain for chain in found if chain]


def defines(path: str, name: str) -> bool:
    """Whether a file has a function, or a class with a method, of this dotted name."""
    nodes: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        named = [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        if not named:
            return False
        nodes = named[0].body
    return True


def test_the_chains_of_calls_exist() -> None:
    assert len(chains()) >= 3
    for chain in chains():
        for path, name in chain:
            assert defines(path, name), f"{path} has no {name}"
        for (path, _), (next_path, called) in pairwise(chain):
            # A process is started by its module's name.
            module = next_path.removesuffix(".py").replace("/", ".")
            words = "|".join(map(re.escape, {*called.split("."), module}))
            assert re.search(rf"\b({words})\b", (ROOT / path).read_text()), f"{path} has none of {words}"


def test_the_chains_are_short() -> None:
    assert max(len(chain) for chain in chains()) <= MOST_FILES


def test_files_that_pages_name_exist() -> None:
    missing = []
    for page in PAGES:
        for path in re.findall(r"\b((?:traces|planner|sim|executor|experiments|tests)/[\w/]+\.\w+)", page.read_text()):
            if not (ROOT / path).exists():
                missing.append(f"{page.relative_to(ROOT)}: {path}")
    assert not missing
