"""The verbs ``ropebridge bench`` and ``ropebridge reproduce``: measure, and check the results."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from executor.wan.linux import read_tcp
from experiments.benches.execution.data import measure_data
from experiments.benches.execution.executor import measure_executor
from experiments.benches.execution.job_queue import measure_jobs
from experiments.benches.execution.recovery import measure_recovery
from experiments.benches.faults.busy import measure_busy
from experiments.benches.faults.faults import measure_faults
from experiments.benches.faults.slowing import measure_strangers
from experiments.benches.fidelity.fidelity import measure_fidelity
from experiments.benches.fidelity.outer_steps import measure_outer_steps
from experiments.benches.planning.adaptation import measure_adaptation
from experiments.benches.planning.clusters import measure_clusters
from experiments.benches.planning.planner import measure_planner
from experiments.benches.planning.real_gains import measure_real_gains
from experiments.benches.planning.regret import measure_regret
from experiments.benches.planning.schedules import measure_schedules
from experiments.benches.regions.separate_training import measure_separate_training
from experiments.benches.regions.struck_workers import measure_struck_workers
from experiments.benches.regions.time_to_loss import measure_time_to_loss
from experiments.benches.report import measure_report
from experiments.benches.result import BenchResult, Check, Reproduction, plain_number
from experiments.benches.sailor.accuracy import measure_accuracy
from experiments.benches.sailor.measured_files import find_measured_files
from experiments.benches.simulation.profile import measure_profile
from experiments.benches.simulation.simulator import measure_simulator
from experiments.benches.simulation.sweep import measure_sweep
from experiments.reproductions.asteroid.reproduction import reproduce_asteroid
from experiments.reproductions.cannikin.reproduction import reproduce_cannikin
from experiments.reproductions.cloudless.reproduction import reproduce_cloudless
from experiments.reproductions.deepcee.reproduction import reproduce_deepcee
from experiments.runs.folder import new_folder
from traces.common.atomic import write_text_atomically
from traces.common.errors import InputError, find_by_name

# Called with ``quick`` and ``tell``, and with those of `OPTIONS` that the bench takes.
Bench = Callable[..., BenchResult]

BENCHES: Mapping[str, Bench] = {
    "accuracy": measure_accuracy,
    "adaptation": measure_adaptation,
    "busy": measure_busy,
    "clusters": measure_clusters,
    "data": measure_data,
    "diloco": measure_separate_training,
    "exchanges": measure_outer_steps,
    "executor": measure_executor,
    "faults": measure_faults,
    "fidelity": measure_fidelity,
    "gains": measure_real_gains,
    "jobs": measure_jobs,
    "planner": measure_planner,
    "profile": measure_profile,
    "recovery": measure_recovery,
    "regions": measure_time_to_loss,
    "regret": measure_regret,
    "report": measure_report,
    "schedules": measure_schedules,
    "simulator": measure_simulator,
    "strangers": measure_strangers,
    "sweep": measure_sweep,
    "workers": measure_struck_workers,
}

# The benches that take each option: the number of cases, the seed of the first one or of the draw, and the folder of
# the results, so that a bench that was interrupted goes on.
OPTIONS: Mapping[str, Sequence[str]] = {
    "count": ("adaptation", "busy", "clusters", "diloco", "faults", "gains", "regret", "strangers"),
    "seed": ("adaptation", "clusters", "faults", "gains", "regret"),
    "keep": ("adaptation", "clusters", "diloco", "fidelity", "regret"),
}


def bench(
    name: str,
    quick: bool,
    as_json: bool,
    tell: Callable[[str], None],
    files: tuple[Path | None, Path | None, Path | None, Path | None, str] | None = None,
    keep: Path | None = None,
    refit: bool = False,
    count: int | None = None,
    seed: int | None = None,
) -> tuple[str, bool]:
    """Run one of `BENCHES`, with ``quick`` on fewer cases; return what to print and whether every check holds.

    ``files`` are the arguments of `find_measured_files`: paths of runs, layer times, layer sizes and network, and the
    model's name. Only bench ``accuracy`` takes them, and ``refit``, with which it also fits its constants anew.
    `OPTIONS` says which benches take ``keep``, ``count`` and ``seed``.

    Raises:
        InputError: There is no such bench, or an option is given that belongs to another bench.
    """
    chosen = find_by_name(name, BENCHES, "bench")
    if files is not None and name != "accuracy":
        advice = "leave out --runs, --times, --sizes, --network and --model, which only 'accuracy' reads"
        raise InputError(f"bench '{name}' takes no files", where="bench", valid=advice)
    if refit and name != "accuracy":
        raise InputError(f"bench '{name}' fits no constants", where="bench", valid="leave out --refit")
    options = {"count": count, "seed": seed, "keep": keep}
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if name not in OPTIONS[option]:
            advice = f"leave it out; {', '.join(OPTIONS[option])} take it"
            raise InputError(f"bench '{name}' does not take --{option}", where="bench", valid=advice)
    if name == "accuracy":
        result = measure_accuracy(quick, tell, None if files is None else find_measured_files(*files), refit=refit)
    else:
        result = chosen(quick, tell, **given)
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    return _json(result) if as_json else f"{result.text()}\n{machine}", _all_hold(result.checks)


Reproduce = Callable[[bool, Callable[[str], None]], Reproduction]

REPRODUCTIONS: Mapping[str, Reproduce] = {
    "asteroid": reproduce_asteroid,
    "cannikin": reproduce_cannikin,
    "cloudless": reproduce_cloudless,
    "deepcee": reproduce_deepcee,
}


def reproduce(
    name: str, quick: bool, as_json: bool, output: Path | None, tell: Callable[[str], None]
) -> tuple[str, bool]:
    """Reproduce a system's claims; return what to print and whether every check holds.

    ``result.json`` and ``figure.png`` are written into the folder ``output``, unless it is None.

    Raises:
        InputError: There is no such system, or the folder cannot be written to.
    """
    chosen = find_by_name(name, REPRODUCTIONS, "system")
    return _write(lambda: chosen(quick, tell), as_json, output, "result.json")


def execute_reproduction(
    name: str, quick: bool, as_json: bool, output: Path | None, tell: Callable[[str], None]
) -> tuple[str, bool]:
    """Run a system and its rivals for real and in the simulator; return what to print and whether the ratios agree.

    Cannikin and its rivals also train a model to a target, Cloudless-Training's methods to an accuracy; ``quick`` takes
    fewer of these runs.

    ``executed.json`` is written into the folder ``output``, unless it is None.

    Raises:
        InputError: There is no such system, or the folder cannot be written to.
    """
    # Imported here, since it loads torch, which a simulation does not need.
    from experiments.reproductions.cannikin.executed import execute_training
    from experiments.reproductions.cloudless.executed import execute_accuracy
    from experiments.reproductions.executed.execution import COMPARISONS, execute, executed_checks

    comparisons = find_by_name(name, COMPARISONS, "system")

    def compared() -> BenchResult:
        rows = [row for comparison in comparisons() for row in execute(comparison, tell)]
        checks = executed_checks(rows)
        trainings = {"cannikin": execute_training, "cloudless": execute_accuracy}
        if name not in trainings:
            return BenchResult(rows, checks)
        trained = trainings[name](quick, tell)
        return BenchResult([*rows, *trained.rows], [*checks, *trained.checks])

    return _write(compared, as_json, output, "executed.json")


def _write(
    measure: Callable[[], BenchResult | Reproduction], as_json: bool, output: Path | None, name: str
) -> tuple[str, bool]:
    """Measure, and write the result into a new folder; return what to print and whether every check holds."""
    with new_folder(output) if output is not None else nullcontext() as folder:
        result = measure()
        document = _json(result)
        if folder is not None:
            write_text_atomically(folder / name, document)
            if isinstance(result, Reproduction):
                result.draw(folder / "figure.png")
    return document if as_json else result.text(), _all_hold(result.checks)


def _json(result: BenchResult | Reproduction) -> str:
    return json.dumps({**result.document(), "machine": describe_machine()}, default=plain_number)


def _all_hold(checks: Sequence[Check]) -> bool:
    return all(check.holds for check in checks)


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, system, versions and TCP settings of this machine, which measurements depend on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        # This machine's TCP settings, which connections over emulated links with TCP "as-is" have.
        **read_tcp(),
    }
