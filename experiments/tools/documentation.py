"""Generates documentation from the code: ``python -m experiments.tools.documentation reference FOLDER``.

With ``schemas FOLDER`` it writes the JSON Schemas of scenario, plan, sweep and convergence files instead.
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer
from pydantic import TypeAdapter
from typer.core import TyperCommand, TyperGroup

from experiments.cli.app import app
from experiments.sweep.sweep_file import SweepEntry
from planner.files.plan import plan_schema
from planner.files.scenario import scenario_schema
from planner.files.training import ConvergenceEntry
from traces.common.atomic import write_text_atomically

# Modules of the Python reference: the public interface for authors of strategies, policies and tools.
PUBLIC = (
    "ropebridge/__init__.py",
    "traces/trace.py",
    "planner/scenario/scenario.py",
    "planner/scenario/cluster.py",
    "planner/scenario/profile.py",
    "planner/plan/plan.py",
    "planner/step/evaluate.py",
    "planner/cost/in_flight.py",
    "planner/check/__init__.py",
    "planner/adapt/policy.py",
    "planner/systems/deepcee/observed_paths.py",
    "planner/events/event.py",
    "planner/runs/event_totals.py",
    "planner/runs/metrics.py",
    "planner/runs/record.py",
)
_ROOT = Path(__file__).parents[2]


def reference_texts() -> Mapping[str, str]:
    """Return the text of each page of the reference by the page's name."""
    return {"commands.md": _commands(), "python.md": _python()}


def schema_texts() -> Mapping[str, str]:
    """Return the text of each schema file by the file's name."""
    sweep_schema = TypeAdapter(SweepEntry).json_schema()
    schemas = {"scenario.json": scenario_schema(), "plan.json": plan_schema(), "sweep.json": sweep_schema}
    schemas["convergence.json"] = TypeAdapter(ConvergenceEntry).json_schema()
    return {name: json.dumps(schema, indent=1) + "\n" for name, schema in schemas.items()}


def verbs() -> Iterator[tuple[str, TyperCommand]]:
    """Yield each verb of the command with its full name, such as ``traces show``."""
    found = typer.main.get_command(app)
    assert isinstance(found, TyperGroup)
    for name, command in found.commands.items():
        inner = command.commands if isinstance(command, TyperGroup) else {"": command}
        for rest, each in inner.items():
            assert isinstance(each, TyperCommand)
            yield f"{name} {rest}".strip(), each


def _commands() -> str:
    parts = ["# Commands\n\nMade by `make reference` from the command itself.\n"]
    for name, command in verbs():
        parts.append(f"\n## ropebridge {name}\n\n{' '.join((command.help or '').split())}\n\n")
        for parameter in command.params:
            help_text = " ".join((getattr(parameter, "help", None) or "").split())
            if parameter.param_type_name == "argument":
                parts.append(f"- `{parameter.metavar or str(parameter.name).upper()}` {help_text}\n")
            elif parameter.name != "help":
                parts.append(f"- `{', '.join(parameter.opts)}` {help_text}\n")
    return "".join(parts)


def _python() -> str:
    parts = ["# Python\n\nMade by `make reference` from docstrings: what strategies, policies and tools build on.\n"]
    for path in PUBLIC:
        tree = ast.parse((_ROOT / path).read_text())
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        parts.append(f"\n## {module}\n\n{_docstring(tree)}\n")
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                parts.append(f"\n### {_signature(node)}\n\n{_docstring(node)}\n")
                if isinstance(node, ast.ClassDef):
                    parts += _methods(node)
    return "".join(parts)


def _methods(node: ast.ClassDef) -> list[str]:
    public = (each for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"))
    return [f"\n#### {node.name}.{_signature(each)}\n\n{_docstring(each)}\n" for each in public]


def _signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"`{node.name}({ast.unparse(node.args)}){returns}`"


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    summary, _, rest = text.partition("\n\n")
    return f"{summary}\n\n```text\n{rest}\n```" if rest else summary


def main(part: str, folder: Path) -> None:
    """Write the files of a part, ``reference`` or ``schemas``, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"reference": reference_texts, "schemas": schema_texts}[part]().items():
        write_text_atomically(folder / name, text)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
