"""``ropebridge bench``: measurements of ropebridge itself, held against its bars."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from experiments.benches.execution.executor import measure_executor
from experiments.benches.execution.recovery import measure_recovery
from experiments.benches.planning.adaptation import measure_adaptation
from experiments.benches.planning.planner import measure_planner
from experiments.benches.planning.schedules import measure_schedules
from experiments.benches.report import measure_report
from experiments.benches.result import BenchResult, plain_number
from experiments.benches.sailor.accuracy import measure_accuracy
from experiments.benches.sailor.measured_files import find_measured_files
from experiments.benches.simulation.fidelity import measure_fidelity
from experiments.benches.simulation.profile import measure_profile
from experiments.benches.simulation.simulator import measure_simulator
from experiments.benches.sweep import measure_sweep
from experiments.runs.machine import describe_machine
from traces.common.errors import InputError
from traces.common.names import find_by_name

Bench = Callable[[bool, Callable[[str], None]], BenchResult]

BENCHES: Mapping[str, Bench] = {
    "accuracy": measure_accuracy,
    "adaptation": measure_adaptation,
    "executor": measure_executor,
    "fidelity": measure_fidelity,
    "planner": measure_planner,
    "profile": measure_profile,
    "recovery": measure_recovery,
    "report": measure_report,
    "schedules": measure_schedules,
    "simulator": measure_simulator,
    "sweep": measure_sweep,
}


def bench(
    name: str,
    quick: bool,
    as_json: bool,
    tell: Callable[[str], None],
    files: tuple[Path | None, Path | None, Path | None, Path | None, str] | None = None,
) -> tuple[str, bool]:
    """Run a bench; return what to print and whether every check holds.

    Args:
        name: One of `BENCHES`.
        quick: Fewer cases and steps.
        as_json: Whether to print JSON.
        tell: Takes a line about the progress.
        files: For ``accuracy``: runs, times, sizes, network and the model's name, as `find_measured_files` takes them.

    Raises:
        InputError: There is no such bench, or it takes no files.
    """
    chosen = find_by_name(name, BENCHES, "bench")
    if files is None:
        result = chosen(quick, tell)
    elif name == "accuracy":
        result = measure_accuracy(quick, tell, find_measured_files(*files))
    else:
        raise InputError(f"bench '{name}' takes no files", valid="--runs and what goes with it belong to 'accuracy'")
    holds = all(check.holds for check in result.checks)
    machine = describe_machine()
    if not as_json:
        described = ", ".join(f"{name} {value}" for name, value in machine.items())
        return f"{result.text()}\n{described}", holds
    return json.dumps({**result.document(), "machine": machine}, default=plain_number), holds
