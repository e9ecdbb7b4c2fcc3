"""Folders are rooms: small, and in one order, in which each imports only from rooms before it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.test_faces import FACES

ROOT = Path(__file__).parents[2]
PACKAGES = ("traces", "planner", "sim", "executor", "experiments", "ropebridge")
MOST_ENTRIES = 12

# Every room, lowest first. A module imports from its own room and from those before it.
ROOMS = [
    "traces/common",
    "traces",
    "traces/preemption",
    "traces/formats",
    "traces/generators",
    "traces/probe",
    "planner/scenario",
    "planner/plan",
    "planner/schedules/kernel",
    "planner/schedules",
    "planner/cost",
    "planner/step",
    "planner/step/shared_links",
    "planner/check",
    "planner/events",
    "planner/adapt",
    "planner/files/importers",
    "planner/files",
    "planner/systems/asteroid",
    "planner/systems/baselines",
    "planner/systems/deepcee",
    "planner/systems/cannikin",
    "planner/systems/cloudless",
    "planner/systems/auto/candidates",
    "planner/systems/auto/local_search",
    "planner/systems/auto/forecasting",
    "planner/systems/auto",
    "planner/systems/regional",
    "planner/systems",
    "planner/runs",
    "planner/explain",
    "planner",
    "sim/kernel",
    "sim/network",
    "sim/updates",
    "sim",
    "executor/core",
    "executor/wan",
    "executor/transport",
    "executor/training/data",
    "executor/training/models",
    "executor/training",
    "executor/recovery",
    "executor/runtime",
    "executor/runtime/outer",
    "executor/runtime/decoupled",
    "executor/rank",
    "executor/control/record",
    "executor/control",
    "executor",
    "executor/deploy",
    "executor/profiling",
    "experiments/models",
    "experiments/scenarios",
    "experiments/runs",
    "experiments/runs/jobs",
    "experiments/profiles",
    "experiments/sweep",
    "experiments/sweep/engines",
    "experiments/sweep/backtest",
    "experiments/report/data",
    "experiments/report/html",
    "experiments/report/figures",
    "experiments/report",
    "experiments/benches",
    "experiments/benches/simulation",
    "experiments/benches/fidelity",
    "experiments/benches/execution",
    "experiments/benches/faults",
    "experiments/benches/sailor",
    "experiments/benches/planning",
    "experiments/benches/regions",
    "experiments/reproductions",
    "experiments/reproductions/comparisons",
    "experiments/reproductions/asteroid",
    "experiments/reproductions/cannikin",
    "experiments/reproductions/cloudless",
    "experiments/reproductions/deepcee",
    "experiments/reproductions/executed",
    "experiments/verbs",
    "experiments/cli",
    "experiments",
    "experiments/tools",
    "ropebridge",
]

FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def room_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def modules() -> dict[str, Path]:
    """Every module by its dotted name; a package's face has the package's name."""
    named = {path: path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in FILES}
    return {name.removesuffix(".__init__"): path for path, name in named.items()}


def imported(path: Path, known: dict[str, Path]) -> Iterator[Path]:
    """The modules of ours that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found = known.get(f"{node.module}.{alias.name}") or known.get(node.module)
                if found is not None:
                    yield found
        elif isinstance(node, ast.Import):
            yield from (known[alias.name] for alias in node.names if alias.name in known)


def test_every_folder_with_code_is_a_room_in_the_order() -> None:
    folders = {room_of(path) for path in FILES}
    assert folders - set(ROOMS) == set(), "add the folder to ROOMS, at its place"
    assert set(ROOMS) - folders == set(), "these rooms are gone"


def test_rooms_import_only_from_rooms_before_them() -> None:
    number = {room: index for index, room in enumerate(ROOMS)}
    known = modules()
    # A face names what its package's own rooms define.
    faces = {known[package] for package in FACES}
    upwards = {
        f"{path.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
        for path in FILES
        if path not in faces
        for other in imported(path, known)
        if number[room_of(other)] > number[room_of(path)]
    }
    assert not upwards


def test_a_folder_holds_few_entries() -> None:
    crowded = []
    for folder in {path.parent for path in FILES}:
        entries = [each for each in folder.iterdir() if each.name not in ("__init__.py", "__pycache__")]
        if len(entries) > MOST_ENTRIES:
            crowded.append(f"{folder.relative_to(ROOT)}: {len(entries)} entries")
    assert not crowded
