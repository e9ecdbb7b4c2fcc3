"""The house rules of imports: downwards only, and nothing heavy where it is not needed."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What each package may import, beside itself.
BELOW = {
    "traces": set(),
    "planner": {"traces"},
    "sim": {"planner", "traces"},
    "executor": {"planner", "traces"},
    "experiments": {"sim", "executor", "planner", "traces"},
    "ropebridge": {"experiments", "sim", "executor", "planner", "traces"},
}
TORCH_FREE = ("traces", "planner", "sim")
HEAVY = {"torch", "matplotlib", "bokeh"}

# The only packages and modules whose purpose is to draw.
DRAWING = ("experiments.report.figures.", "experiments.reproductions.figures")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for package in BELOW for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), str(MODULES[module]))


def imports(nodes: Iterator[ast.AST]) -> set[str]:
    """Full names of what import statements among the nodes load, with what they take from it."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports in this house are absolute"
            assert node.module is not None
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            function = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if function in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                names.add(str(node.args[0].value))
    return names


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """What is carried out when a module is loaded: everything outside of functions and of TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_module_level(child)


def loaded_with(names: set[str]) -> set[str]:
    """Modules of ours, and packages of others, that are loaded when these are imported."""
    loaded: set[str] = set()
    queue = sorted(names)
    while queue:
        name = queue.pop()
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            module = ".".join(parts[:length])
            if module in MODULES:
                if module not in loaded:
                    loaded.add(module)
                    queue += imports(at_module_level(tree(module)))
            elif length == 1:
                loaded.add(module)
    return loaded


def test_imports_point_down_only() -> None:
    wrong = []
    for module in MODULES:
        package = module.split(".")[0]
        ours = {name.split(".")[0] for name in imports(ast.walk(tree(module)))} & set(BELOW)
        wrong += [f"{module} imports {name}" for name in sorted(ours - BELOW[package] - {package})]
    assert not wrong


def test_planner_sim_and_traces_never_import_torch() -> None:
    own = [name for name in MODULES if name.split(".")[0] in TORCH_FREE]
    lazily = [name for name in own if "torch" in {each.split(".")[0] for each in imports(ast.walk(tree(name)))}]
    assert not lazily
    assert "torch" not in loaded_with(set(own))


def test_only_modules_that_draw_load_matplotlib_themselves() -> None:
    others = [name for name in MODULES if not name.startswith(DRAWING)]
    wrong = [name for name in others if "matplotlib" in {i.split(".")[0] for i in imports(at_module_level(tree(name)))}]
    assert not wrong


def test_loading_the_command_loads_neither_torch_nor_matplotlib() -> None:
    assert not loaded_with({"experiments.cli.app", "experiments.__main__"}) & HEAVY


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_planning_and_simulating_load_neither_torch_nor_matplotlib(verb: str) -> None:
    functions = [n for n in tree("experiments.cli.plan").body if isinstance(n, ast.FunctionDef) and n.name == verb]
    assert functions, f"experiments/cli/plan.py has no function '{verb}' any more"
    lazily = imports(ast.walk(functions[0]))
    assert lazily, f"'{verb}' imports nothing when it is called: is this test looking in the right place?"
    assert not loaded_with(lazily) & HEAVY


def test_the_launcher_of_paced_runs_does_not_load_torch() -> None:
    assert "torch" not in loaded_with({"executor.backend", "experiments.verbs.run", "experiments.runs.carry_out"})


def test_the_walk_through_imports_finds_what_is_there() -> None:
    # A walk that found nothing would let everything pass.
    assert "torch" in loaded_with({"executor.rank.worker"})
    assert "matplotlib" in loaded_with({"experiments.report.figures.run_figure"})
    assert {"sim.simulator", "planner.step.compile", "traces.trace", "simpy"} <= loaded_with({"sim.simulator"})


def test_a_process_that_does_it_has_loaded_neither(tmp_path: Path) -> None:
    calls = [("plan", "two-regions"), ("simulate", "two-regions", "--steps", "2")]
    program = (
        "import sys\n"
        "from experiments.cli.app import main\n"
        f"for arguments in {calls}:\n"
        "    sys.argv[1:] = arguments\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        f"    print(arguments[0], sorted({HEAVY} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout
    loaded = [line for line in done.stderr.splitlines() if line.startswith(("plan [", "simulate ["))]
    assert loaded == ["plan []", "simulate []"], done.stderr
