"""Run folders: scenario, plan, events, decisions and summary of a run, written completely or not at all."""

import hashlib
import json
import math
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from errno import ENOTDIR
from pathlib import Path
from typing import Any

from planner.adapt.gradient_noise import ESTIMATORS, GradientNorms, smoothed_noise
from planner.events.event import write_events
from planner.events.file import EventFile
from planner.files.documents import read_json, read_json_lines
from planner.files.effects import network_name
from planner.files.plan import decision_json, parse_decision, read_plan, write_plan
from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.runs.memory_timeline import peak_memory_bytes
from planner.runs.metrics import measure
from planner.runs.record import Interruption, RealNetwork, RunRecord
from traces.common.atomic import has_passing_folder, passing_folder
from traces.common.errors import InputError, RunError

# File of the events, which a simulation writes while it runs.
EVENTS = "events.parquet"

# File of the squared gradient norms of each step, if they were measured.
_NORMS = "gradient-noise.jsonl"

# End of the name of a folder that is being written.
_PARTIAL = ".part"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``target``; rename it to ``target`` at the end, and remove it on an error.

    Temporary folders for the same target that killed processes of this user and host have left are removed.

    Raises:
        InputError: ``target`` exists already, a process of this machine is writing it, or no folder can be made there.
        RunError: ``target`` was created by another process in the meantime; the message names the temporary folder.
    """
    target = target.resolve()
    with ExitStack() as stack:
        try:
            taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
            # Folders above the target are made only when it is complete, so that a failed run leaves none.
            ground = next((parent for parent in target.parents if os.path.lexists(parent)), target)
            if taken:
                advice = "name a new folder, or remove it first"
                raise InputError("this path exists already", where=str(target), valid=advice)
            if not ground.is_dir():
                raise NotADirectoryError(ENOTDIR, f"'{ground}' is not a folder")
            # Targets of one name lie beside each other while the folders around them are not made.
            mark = hashlib.sha256(os.fsencode(target)).hexdigest()[:12]
            start = f".{target.name[:80]}.{mark}.{socket.gethostname()}."
            if has_passing_folder(ground, start, _PARTIAL):
                advice = "name a new folder, or wait until it is there"
                raise InputError("this folder is being written now, by another run", where=str(target), valid=advice)
            beside = stack.enter_context(passing_folder(ground, start, _PARTIAL))
        except OSError as error:
            raise no_folder(target, error) from None
        try:
            yield beside
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            target.rmdir()
        beside.rename(target)
    except OSError as error:
        # The folder is kept, since its content may have taken hours, under a name that no later run removes.
        kept = beside.with_suffix(".kept")
        with suppress(OSError):
            beside = beside.rename(kept)
        raise RunError(f"'{target}' cannot be made: {error.strerror}; everything is in '{beside}'") from error


def no_folder(place: Path, error: OSError) -> InputError:
    """Return the error for a path at which no folder can be made."""
    problem = f"no folder can be made here: {error.strerror}"
    return InputError(problem, where=str(place), valid="choose a place that can be written")


def write_record(record: RunRecord, folder: Path) -> None:
    """Write a run into an empty folder, from which `read_record` reads it.

    Raises:
        RunError: The disk is full or fails.
    """
    decisions = [decision_json(decision) for decision in record.decisions]
    norms = [
        {**asdict(each), "estimates": {name: asdict(each.estimate(name)) for name in ESTIMATORS}}
        for each in record.gradient_norms
    ]
    try:
        folder.mkdir(exist_ok=True)
        write_resolved_scenario(record.scenario, folder / "scenario.json")
        write_plan(record.plan, folder / "plan.json")
        if not (isinstance(record.events, EventFile) and record.events.path == folder / EVENTS):
            write_events(record.events, folder / EVENTS)
        (folder / "decisions.jsonl").write_text("".join(json.dumps(decision) + "\n" for decision in decisions))
        if norms:
            (folder / _NORMS).write_text("".join(json.dumps(each) + "\n" for each in norms))
        (folder / "summary.json").write_text(json.dumps(summarise(record), indent=1) + "\n")
    except OSError as error:
        raise RunError(f"the run cannot be written into '{folder}': {error.strerror or error}") from error


def read_record(folder: Path) -> RunRecord:
    """Return the run in a folder. Its events are read when they are used, part by part.

    Raises:
        InputError: The folder does not hold a run.
    """
    if not (folder / "summary.json").is_file():
        raise InputError(
            "this folder holds no run" if folder.is_dir() else "there is no such folder",
            where=str(folder),
            valid="name one that 'simulate', 'run' or 'demo' wrote",
        )
    try:
        summary = read_json(folder / "summary.json")
        decisions = tuple(parse_decision(value) for value in read_json_lines(folder / "decisions.jsonl"))
        events = EventFile(folder / EVENTS)
        measured = read_json_lines(folder / _NORMS) if (folder / _NORMS).exists() else []
        norms = tuple(GradientNorms.from_json(value) for value in measured)
        backend, losses = summary["backend"], tuple(math.nan if loss is None else loss for loss in summary["losses"])
        network = _network(summary)
        # Runs of earlier versions lack this entry.
        interruptions = tuple(Interruption(**each) for each in summary.get("interruptions", ()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{type(error).__name__}: {error}"
        raise InputError(f"the run is damaged: {text}", where=str(folder), valid="run it again") from None
    scenario = read_resolved_scenario(folder / "scenario.json")
    plan, computed_on = read_plan(folder / "plan.json"), str(summary.get("computed_on", ""))
    before, policy = int(summary.get("samples_before", 0)), str(summary.get("policy", ""))
    return RunRecord(
        backend, scenario, plan, events, decisions, losses, norms, network, computed_on, before, interruptions, policy
    )


@contextmanager
def reading(folders: str) -> Iterator[None]:
    """Return a context that turns what fails in it on damaged runs into an `InputError`.

    Each file of a run folder can be read by itself, and yet somebody may have changed one of them so that it
    contradicts the others: events name devices that the scenario lacks, or actions that the plan lacks.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        raise InputError(f"the run is damaged: {text}", where=folders, valid="run it again") from error


def summarise(record: RunRecord) -> dict[str, Any]:
    """Return the summary of a run as plain values for JSON, by names that end in their units."""
    return {
        "backend": record.backend,
        "emulator": record.network.emulator if record.network is not None else None,
        "tcp": record.network.tcp if record.network is not None else None,
        "network_effects": network_name(record.scenario.effects.network) if record.backend == "simulated" else None,
        "computed_on": record.computed_on,
        "samples_before": record.samples_before,
        "interruptions": [asdict(each) for each in record.interruptions],
        "scenario": record.scenario.name,
        "strategy": record.plan.strategy,
        "schedule": record.plan.schedule,
        "policy": record.policy,
        **asdict(measure(record)),
        "peak_memory_bytes": peak_memory_bytes(record),
        "decisions": len(record.decisions),
        # JSON has no numbers that are not finite, which a run with ``--allow-nan`` can have.
        "losses": [loss if math.isfinite(loss) else None for loss in record.losses],
        "gradient_noise_scale": _noise_scales(record),
    }


def _noise_scales(record: RunRecord) -> dict[str, float | None] | None:
    """Return the gradient noise scale by each estimator, samples; None where noise hides the gradient."""
    if not record.gradient_norms:
        return None
    scales = {}
    for name in ESTIMATORS:
        smoothed = smoothed_noise(record.gradient_norms, name)
        scale = smoothed.noise_scale if smoothed is not None else math.inf
        scales[name] = scale if math.isfinite(scale) else None
    return scales


def _network(summary: dict[str, Any]) -> RealNetwork | None:
    """Return the network of a real run; None for a simulation, and for a run of an old version, which lacks it."""
    emulator = summary.get("emulator")
    return RealNetwork(emulator, summary["tcp"]) if emulator is not None else None
