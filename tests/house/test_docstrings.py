"""Every public thing says what it is, and every public number in which unit."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("traces", "planner", "sim", "executor", "experiments", "ropebridge")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]

# Endings of a name that say its unit.
UNITS = (
    "_s",  # seconds, or per second: samples_per_s
    "_bps",  # bits per second
    "_bits",
    "_bytes",
    "_flop",  # floating-point operations
    "_flops",  # floating-point operations per second
    "_usd",
    "_per_hour",  # US dollars
    "_per_gb",  # US dollars per 1e9 bytes
    "_ratio",
    "_share",  # of a whole, or relative to the other shares
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_public(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_")


def public_definitions(
    node: ast.Module | ast.ClassDef, owner: str = ""
) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    """Public classes and functions of a module, and those of its public classes, by dotted name."""
    for child in node.body:
        if is_public(child):
            assert isinstance(child, ast.ClassDef | Function)
            yield f"{owner}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child, f"{owner}{child.name}.")


def floats(owner: ast.ClassDef | Function) -> Iterator[str]:
    """Names of parameters, or of fields of a class, whose type holds a float."""
    if isinstance(owner, ast.ClassDef):
        named = [(n.target.id, n.annotation) for n in owner.body if isinstance(n, ast.AnnAssign) if is_name(n.target)]
    else:
        arguments = owner.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named = [(argument.arg, argument.annotation) for argument in every]
    for name, annotation in named:
        if name.startswith("_") or annotation is None:
            continue
        if holds_floats(annotation):
            yield name


def holds_floats(annotation: ast.expr) -> bool:
    """Whether a type is float, float or None, or a sequence of or mapping to these; no union with other types."""
    if isinstance(annotation, ast.BinOp):
        sides = [annotation.left, annotation.right]
        return all(holds_floats(side) for side in sides if ast.unparse(side) != "None")
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        container = ast.unparse(annotation.value).rpartition(".")[2]
        if container == "Annotated":
            return holds_floats(inner[0])
        if container in ("Mapping", "dict"):
            return holds_floats(inner[-1])
        return container in ("tuple", "list", "Sequence", "Iterable") and any(map(holds_floats, inner))
    return isinstance(annotation, ast.Name) and annotation.id == "float"


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_public_thing_has_a_docstring() -> None:
    missing = []
    for path in FILES:
        module = ast.parse(path.read_text())
        if not ast.get_docstring(module):
            missing.append(f"{relative(path)}: the module itself")
        missing += [
            f"{relative(path)}: {name}" for name, node in public_definitions(module) if not ast.get_docstring(node)
        ]
    assert not missing


def test_every_public_float_says_its_unit() -> None:
    without = []
    for path in FILES:
        for owner, node in public_definitions(ast.parse(path.read_text())):
            documentation = ast.get_docstring(node) or ""
            for name in floats(node):
                says = f"_{name}".endswith(UNITS) or re.search(rf"\b{name}\b", documentation)
                if not says:
                    without.append(f"{relative(path)}: {owner}: {name}")
    assert not without, f"end the name in one of {', '.join(UNITS)}, or say in the docstring what it counts"
