"""The public faces of the packages: few names, which resolve, and load nothing heavy until they are asked for."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

ROOT = Path(__file__).parents[2]
MOST_NAMES = 15
HEAVY = ("torch", "matplotlib", "numba", "pandas")

FACES = {
    "planner": "Scenario Cluster Device Link ModelProfile Training Plan check_plan step_time_s make_plan make_policy "
    "read_scenario read_plan write_plan",
    "planner.adapt": "Policy Observation PathObservation Decision Adaptation Migration migration_between",
    "planner.runs": "Backend RunRecord Progress Metrics measure memory_timelines",
    "sim": "Simulator StopCondition",
    "executor": "TorchBackend",
    "traces": "LinkTrace read_trace write_trace generate preset resampled describe sparkline PreemptionTrace "
    "read_preemption RopebridgeError InputError RunError parse_duration_s parse_bandwidth_bps",
}


def names_for_type_checkers(package: str) -> list[str]:
    """The names that a package imports under TYPE_CHECKING."""
    tree = ast.parse(Path(ROOT, *package.split("."), "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return [str(alias.asname) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]


@pytest.mark.parametrize("package", FACES)
def test_a_face_has_these_names_and_each_resolves(package: str) -> None:
    face = import_module(package)
    expected = sorted(FACES[package].split())
    assert sorted(face.__all__) == dir(face) == sorted(names_for_type_checkers(package)) == expected
    assert len(face.__all__) <= MOST_NAMES
    for name in face.__all__:
        assert getattr(face, name).__name__ == name


@pytest.mark.parametrize("package", FACES)
def test_no_public_name_is_hidden_by_a_submodule(package: str) -> None:
    submodules = {module.name for module in iter_modules(import_module(package).__path__)}
    assert not submodules & set(FACES[package].split())


def test_a_name_that_is_not_public_is_refused_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match="module 'sim' has no attribute 'Simulate'; its public names: Simulator, "):
        _ = import_module("sim").Simulate


def test_importing_all_faces_loads_nothing_heavy() -> None:
    program = f"import sys, {', '.join(FACES)}; print(sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
