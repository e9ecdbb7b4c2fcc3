"""The verb ``ropebridge profile convergence``: short real runs by several methods, and the law of their losses.

Workers are processes of this machine. Each finished run is written to the file at once, so that the same command goes
on after it was interrupted. The loss is that of the parameters which a run would write, the mean of its workers', on
samples that no run has had, the same ones for all runs. It is measured after some of the steps, which exchanges follow.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from executor.backend import TorchBackend
from executor.core.job import CheckpointConfig
from executor.recovery.export import parameters_by_step
from experiments.profiles.model_config import rising_numbers
from experiments.profiles.unseen_loss import UnseenSamples
from experiments.runs.scenario import choose_scenario
from planner.check import check_plan
from planner.files.documents import plain
from planner.files.training import CONVERGENCE_VERSION, ConvergenceEntry, LossRunEntry, read_convergence
from planner.plan.microbatches import even_cut
from planner.plan.outer_step import OUTER_COMPRESSIONS
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.convergence_fit import FIRST_SHARE, LossCurve, fit_law, held_out_errors
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.convergence import CONFIDENCE, SHAPE, TERMS, LossLaw, TrainingMode
from planner.scenario.effects import Effects
from planner.scenario.scenario import Scenario
from planner.systems.regional.loss_plan import most_overlap, outer_settings
from traces.common.atomic import check_place, scratch_folder, write_text_atomically
from traces.common.errors import InputError, find_by_name

_ALLREDUCE, _STREAMING = "allreduce", "diloco-streaming"
_FRAGMENTS = 2

# About how many losses of a run are measured, and on how many samples, as a multiple of the global batch.
_MEASURED, _UNSEEN_BATCHES = 10, 8

# Share of this machine's memory that the workers of a run may take together by the plan's check. The rest is left for
# Python and torch in each process, and for whatever else runs here.
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class ConvergenceConfig:
    """The runs that are asked for.

    Attributes:
        scenario: File or name of the scenario, whose model, data, batch and optimizer the runs have.
        methods: Comma-separated methods beside ``allreduce``.
        workers: Comma-separated rising numbers of workers.
        intervals: Comma-separated rising steps between two exchanges.
        compressions: Comma-separated formats of pseudo-gradients.
        momenta: Comma-separated momenta of outer steps.
        steps: Steps of each run.
        seeds: Number of seeds of each setting.
    """

    scenario: str
    methods: str
    workers: str
    intervals: str
    compressions: str
    momenta: str
    steps: int
    seeds: int


@dataclass(frozen=True, slots=True)
class _Case:
    mode: TrainingMode
    seed: int


def profile_convergence(config: ConvergenceConfig, output: Path, as_json: bool, tell: Callable[[str], None]) -> str:
    """Carry out the runs that the file does not have yet, fit the law, and return it as text or as JSON.

    Raises:
        InputError: An option or the scenario is wrong, the scenario has no code, or the file is of another task.
        RunError: A run has failed; finished ones are in the file.
    """
    check_place(output)
    if output.suffix != ".json":
        raise InputError(f"'{output}' does not end in .json", where="--output", valid="the file is JSON: name it so")
    scenario = choose_scenario(config.scenario)
    if scenario.code is None:
        raise InputError(
            "the scenario's model has no code, and cannot be trained",
            where="SCENARIO",
            valid="add 'code:' to the model",
        )
    cases = list(_cases(config, scenario))
    _refuse_too_large(scenario, cases)
    task = _task(scenario, config.steps)
    runs, batch = _kept(output, task), scenario.training.global_batch
    unseen: UnseenSamples | None = None
    for number, case in enumerate(cases):
        if case in runs:
            continue
        mode = case.mode
        tell(
            f"run {number + 1} of {len(cases)}: {mode.method}, {mode.workers} workers, exchanges after "
            f"{mode.interval_steps} steps, compression {mode.compression}, outer momentum {mode.momentum:g}, "
            f"seed {case.seed}"
        )
        unseen = unseen or UnseenSamples(scenario, config.steps * batch, _UNSEEN_BATCHES * batch)
        runs[case] = _curve(scenario, case, config.steps, unseen)
        # Until all runs are there, the file has no law.
        _write(output, scenario, task, runs, None)
    curves = list(runs.values())
    source = f"{len(curves)} runs of {config.steps} steps of {scenario.model.name}"
    law = fit_law(curves, source)
    _write(output, scenario, task, runs, law)
    errors = held_out_errors(curves, source)
    if as_json:
        held_out = [{"workers": m, "interval_steps": h, "error": e} for (m, h), e in errors.items()]
        return json.dumps({"file": str(output), "law": plain(law), "held_out": plain(held_out)}, indent=2)
    return "\n".join(
        [*_table(law, curves, errors), f"written to {output}: name it in 'training: {{convergence: FILE}}'"]
    )


def _cases(config: ConvergenceConfig, scenario: Scenario) -> Iterator[_Case]:
    batch, first = scenario.training.global_batch, scenario.training.seed
    methods = [name for each in config.methods.split(",") if (name := each.strip())]
    compressions = [name for each in config.compressions.split(",") if (name := each.strip())]
    for method in methods:
        find_by_name(method, dict.fromkeys(("diloco", _STREAMING)), "method", where="--methods")
    for each in compressions:
        find_by_name(each, dict.fromkeys(OUTER_COMPRESSIONS), "compression", where="--compressions")
    momenta = [_momentum(each) for each in config.momenta.split(",")]
    workers, intervals = rising_numbers(config.workers, "--workers"), rising_numbers(config.intervals, "--intervals")
    if not 2 <= workers[0] <= workers[-1] <= batch:
        valid = f"give numbers from 2 to {batch}, the global batch"
        raise InputError(f"'{config.workers}' is not allowed", where="--workers", valid=valid)
    if 2 * intervals[-1] > config.steps:
        valid = f"give at most {config.steps // 2}, so that there are two exchanges in {config.steps} steps"
        raise InputError(f"'{config.intervals}' is not allowed", where="--intervals", valid=valid)
    modes = [TrainingMode(_ALLREDUCE, batch)]
    for method, compression, momentum in product(methods, compressions, momenta):
        for count, interval in product(workers, intervals):
            fragments = min(_FRAGMENTS, interval, len(scenario.model.layers)) if method == _STREAMING else 1
            modes.append(TrainingMode(method, batch, count, interval, fragments, compression, momentum))
    for seed in range(first, first + config.seeds):
        yield from (_Case(mode, seed) for mode in modes)


def _momentum(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise InputError(f"'{text}' is not allowed", where="--momenta", valid="give numbers from 0 to below 1")
    return value


def _curve(scenario: Scenario, case: _Case, steps: int, unseen: UnseenSamples) -> LossCurve:
    alone, plan = _alone(scenario, case)
    interval = case.mode.interval_steps
    every = interval * max(1, round(steps / _MEASURED / interval))
    losses = {}
    with scratch_folder() as folder:
        checkpoints = CheckpointConfig(folder, every, kept=steps // every + 1)
        backend = TorchBackend("real", emulator="none", on_this_device=True, checkpoints=checkpoints)
        backend.run(alone, plan, None, steps)
        for stored in parameters_by_step(folder, scenario):
            if stored.step >= FIRST_SHARE * steps:
                losses[stored.step] = unseen.loss(stored.mean)
    return LossCurve(case.mode, tuple(losses), tuple(losses.values()))


def _refuse_too_large(scenario: Scenario, cases: Iterable[_Case]) -> None:
    """Refuse runs whose workers do not fit into this machine's memory, before any of them starts."""
    for mode in dict.fromkeys(case.mode for case in cases):
        alone, plan = _alone(scenario, _Case(mode, scenario.training.seed))
        try:
            check_plan(plan, alone)
        except InputError as error:
            raise InputError(
                f"{mode.workers} workers do not fit into {_MEMORY_SHARE:.0%} of this machine's memory: {error.problem}",
                where="SCENARIO",
                valid="measure a smaller model of the same kind, or fewer workers",
            ) from None


def _alone(scenario: Scenario, case: _Case) -> tuple[Scenario, Plan]:
    """Return the scenario with the workers of a run on this machine, and their plan."""
    mode = case.mode
    kind = scenario.cluster.devices[0].kind
    whole_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory_bytes = int(_MEMORY_SHARE * whole_bytes) // mode.workers
    devices = tuple(Device(f"worker-{n}", kind, f"region-{n}", memory_bytes) for n in range(mode.workers))
    links = tuple(Link(one.region, other.region, 1e10, 0.0) for one in devices for other in devices if one is not other)
    training = replace(scenario.training, seed=case.seed)
    alone = replace(scenario, cluster=Cluster(devices, links), training=training, effects=Effects(), faults=(), data={})
    layers = len(scenario.model.layers)
    pipelines = tuple(
        Pipeline((Stage(0, layers, (Replica(device.name),), 1),), (samples,))
        for device, samples in zip(devices, even_cut(mode.global_batch, mode.workers), strict=True)
    )
    how = Synchronisation()
    if mode.method != _ALLREDUCE:
        outer = outer_settings(mode, most_overlap(mode))
        how = Synchronisation(mode.method, interval_steps=mode.interval_steps, outer=outer)
    plan = Plan(scenario.name, scenario.model.name, "profile convergence", "1f1b", pipelines, synchronisation=how)
    return alone, plan


def _task(scenario: Scenario, steps: int) -> str:
    """Return what the losses depend on beside the settings of a run, as a hash."""
    assert scenario.code is not None, "it was checked"
    training = replace(scenario.training, convergence=None, seed=0)
    code = {**plain(scenario.code), "path": ""}
    text = json.dumps([plain(training), code, steps], sort_keys=True, default=str)
    return hashlib.sha256(text.encode() + scenario.code.source.read_bytes()).hexdigest()[:16]


def _kept(output: Path, task: str) -> dict[_Case, LossCurve]:
    if not output.exists():
        return {}
    entry = read_convergence(output)
    if entry.task != task:
        raise InputError(
            "the file has runs of another model, training or number of steps",
            where=str(output),
            valid="name another file, or remove this one",
        )
    return dict(_run(each, entry) for each in entry.runs)


def _run(each: LossRunEntry, entry: ConvergenceEntry) -> tuple[_Case, LossCurve]:
    settings = (each.workers, each.interval_steps, each.fragments, each.compression, each.momentum)
    mode = TrainingMode(each.method, entry.global_batch, *settings)
    return _Case(mode, each.seed), LossCurve(mode, each.steps, each.losses)


def _write(output: Path, scenario: Scenario, task: str, runs: Mapping[_Case, LossCurve], law: LossLaw | None) -> None:
    rows: list[dict[str, Any]] = []
    for case, curve in runs.items():
        settings = {key: each for key, each in plain(case.mode).items() if key != "global_batch"}
        rows.append({**settings, "seed": case.seed, "steps": list(curve.steps), "losses": list(curve.losses)})
    document = {
        "version": CONVERGENCE_VERSION,
        "model": scenario.model.name,
        "task": task,
        "global_batch": scenario.training.global_batch,
        "runs": rows,
        "law": None if law is None else plain(law),
    }
    write_text_atomically(output, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _table(law: LossLaw, curves: list[LossCurve], errors: Mapping[tuple[int, int], float]) -> list[str]:
    lines = [
        f"{'method':18} {'workers':>7} {'interval':>8} {'compression':>11} {'momentum':>8}  loss at the end, by the law"
    ]
    for mode in dict.fromkeys(curve.mode for curve in curves):
        own = [curve for curve in curves if curve.mode == mode]
        ends = f"{sum(curve.losses[-1] for curve in own) / len(own):.4f}, {law.loss(mode, own[0].steps[-1]):.4f}"
        momentum = "" if mode.method == _ALLREDUCE else f"{mode.momentum:g}"
        settings = f"{mode.workers:7} {mode.interval_steps:8} {mode.compression:>11} {momentum:>8}"
        lines.append(f"{mode.method:18} {settings}  {ends}")
    least, most = np.quantile(np.array(law.draws), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    for place, name in enumerate(TERMS, len(SHAPE)):
        interval = f"{least[place]:+.4f} to {most[place]:+.4f} with {CONFIDENCE:.0%}"
        lines.append(f"exponent of {name}: {law.mean[place]:+.4f} ({interval})")
    if errors:
        lines.append(
            f"steps to the last loss of runs whose workers and interval were left out: {median(errors.values()):.1%} "
            "off in the median"
        )
    return lines
