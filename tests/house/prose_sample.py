"""Prints prose of the project for a reader who does not know it: ``python tests/house/prose_sample.py [SEED]``.

60 docstrings and comments, 20 messages and 3 pages of docs/ are drawn at random, the same for the same seed. Each
docstring and message comes with the lines of code that a reader sees around it, and no more.
"""

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("traces", "planner", "sim", "executor", "experiments", "ropebridge")
SEED = 17

# How many lines of code follow a docstring or a comment.
LINES_AFTER = 4


def files() -> list[Path]:
    """Return the modules of the product, in the order of their paths."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line of each definition with a docstring, and its text with the signature."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            last = node.body[0].end_lineno or node.lineno
            yield node.lineno, "\n".join(lines[node.lineno - 1 : last + LINES_AFTER])
        elif isinstance(node, ast.Module) and ast.get_docstring(node):
            yield 1, "\n".join(lines[: node.body[0].end_lineno])


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line of each comment, and its text with the code that follows."""
    lines = path.read_text().splitlines()
    for index, line in enumerate(lines):
        is_first = line.lstrip().startswith("# ") and not (index and lines[index - 1].lstrip().startswith("# "))
        if is_first:
            last = index
            while last + 1 < len(lines) and lines[last + 1].lstrip().startswith("# "):
                last += 1
            yield index + 1, "\n".join(lines[index : last + 1 + LINES_AFTER])


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each expression that makes an error for users."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in ("InputError", "RunError") and node.args and not isinstance(node.args[0], ast.Name):
            yield node.lineno, ast.get_source_segment(text, node) or ""


def main(seed: int) -> None:
    """Print the sample of a seed."""
    draw = random.Random(seed)
    prose = [(path, *found) for path in files() for kind in (docstrings, comments) for found in kind(path)]
    errors = [(path, *found) for path in files() for found in messages(path)]
    number = 0
    for title, drawn in (
        ("Docstrings and comments", draw.sample(prose, 60)),
        ("Messages", draw.sample(errors, 20)),
    ):
        print(f"## {title}\n")
        for path, line, text in drawn:
            number += 1
            print(f"### {number}. {path.relative_to(ROOT)}:{line}\n\n{text}\n")
    print("## Pages\n")
    for page in draw.sample(sorted((ROOT / "docs").rglob("*.md")), 3):
        number += 1
        print(f"### {number}. {page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SEED)
