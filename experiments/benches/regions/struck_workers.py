"""Kills and stops workers of Decoupled DiLoCo every few seconds; measures goodput, stalls and loss beside quiet runs.

Four ranks of this machine train a small language model of characters, each a worker of its own, at the speed of the
profile, which is slower than the machine: so workers that are away leave no faster machine to the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median, stdev

from safetensors.torch import load_file

from executor.backend import TorchBackend
from experiments.benches.cases import workers_plan
from experiments.benches.regions.separate_training import HUB, KIND, character_scenario, held_out_loss
from experiments.benches.result import BenchResult, Row, at_least, at_most
from planner.events.event import EventKind
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan, Synchronisation
from planner.runs.event_totals import worker_steps
from planner.runs.record import RunRecord
from planner.scenario.faults import Absence, Fault, Hang
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import Scenario
from traces.common.atomic import scratch_folder

_WORKERS = ("west", "east", "north", "south")
_SAMPLES = 8
_STEP_S = 0.25

# Seconds of a run, and from one strike to the next.
_QUICK_S, _QUICK_EVERY_S = 40.0, 8.0
_RUN_S, _EVERY_S = 300.0, 20.0
_SEEDS = 3

# A stopped process is replaced after some seconds, before this one.
_STOPPED_S = 10.0
_KILLED_S = 0.01

LEAST_GOODPUT = 0.85
MOST_STALL_STEPS = 1.0
MOST_DEVIATIONS = 2.0

_HOW = Synchronisation(
    "diloco-decoupled",
    interval_steps=20,
    outer=OuterStep(
        fragments=3, pattern="strided", overlap_steps=2, mixing=0.5, quorum=2, grace_s=_STEP_S, syncers=(HUB,)
    ),
)


@dataclass(frozen=True, slots=True)
class Course:
    """What a run shows.

    Attributes:
        rate: Samples per second of living workers, of each: samples over the seconds in which workers lived.
        gap_steps: The longest time in which no worker finished a step, in median steps.
        own_gap_steps: The longest time in which a living worker finished no step, in median steps.
        away_s: Seconds in which workers were away, all together.
        loss: Loss on held-out text of the common parameters.
    """

    rate: float
    gap_steps: float
    own_gap_steps: float
    away_s: float
    loss: float


def measure_struck_workers(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Train with and without strikes, with each seed; compare."""
    run_s, every_s, seeds = (_QUICK_S, _QUICK_EVERY_S, 1) if quick else (_RUN_S, _EVERY_S, _SEEDS)
    rows: list[Row] = []
    courses: dict[str, list[Course]] = {"quiet": [], "struck": []}
    for seed in range(seeds):
        for name in courses:
            tell(f"{name}: {run_s:.0f} s, seed {seed}")
            faults = strikes(run_s, every_s) if name == "struck" else ()
            course = _train(seed, round(run_s / _STEP_S), faults)
            courses[name].append(course)
            rows.append(
                {
                    "run": name,
                    "seed": seed,
                    "strikes": len(faults),
                    "samples_per_s_living": course.rate,
                    "away_s": course.away_s,
                    "longest_gap_steps": course.gap_steps,
                    "longest_own_gap_steps": course.own_gap_steps,
                    "loss": course.loss,
                }
            )
    quiet, struck = courses["quiet"], courses["struck"]
    goodput = mean(each.rate for each in struck) / mean(each.rate for each in quiet)
    stall = max(each.gap_steps for each in struck) - 1
    checks = [
        at_least("goodput of living workers / undisturbed", goodput, LEAST_GOODPUT),
        at_most("longest stall of all workers, inner steps", stall, MOST_STALL_STEPS),
    ]
    if seeds > 1:
        more = mean(each.loss for each in struck) - mean(each.loss for each in quiet)
        noise = stdev(each.loss for each in quiet)
        checks.append(at_most("loss above undisturbed, deviations of seeds", more / noise, MOST_DEVIATIONS))
    return BenchResult(rows, checks)


def strikes(run_s: float, every_s: float) -> tuple[Fault, ...]:
    """Return the strikes of a run: workers in turn are killed and stopped, alternately."""
    found: list[Fault] = []
    number = 0
    while (start_s := (number + 1) * every_s) < run_s - every_s / 2:
        # With four workers in turn, each is killed and stopped alternately too.
        device = _WORKERS[number % len(_WORKERS)]
        is_killed = (number + number // len(_WORKERS)) % 2 == 0
        kind, lasts_s = (Absence, _KILLED_S) if is_killed else (Hang, _STOPPED_S)
        found.append(kind(device, start_s, start_s + lasts_s))
        number += 1
    return tuple(found)


def _train(seed: int, steps: int, faults: Sequence[Fault]) -> Course:
    scenario, plan = _case(seed, steps, faults)
    with scratch_folder() as folder:
        target = folder / "parameters.safetensors"
        backend = TorchBackend("real", emulator="none", parameters=target, at_profile_speed=True)
        record = backend.run(scenario, plan, None, steps)
        return course_of(record, faults, held_out_loss(scenario, load_file(target)))


def _case(seed: int, steps: int, faults: Sequence[Fault]) -> tuple[Scenario, Plan]:
    scenario = character_scenario(_WORKERS, seed, steps, len(_WORKERS) * _SAMPLES)
    layers = len(scenario.model.layers)
    # A third of the step each for forward, input gradients and weight gradients, over all layers and samples.
    each_s = _STEP_S / 3 / layers / _SAMPLES
    table = TimeTable((1,), (each_s,), (each_s,), (each_s,))
    timed = tuple(replace(layer, times={KIND: table}) for layer in scenario.model.layers)
    scenario = replace(scenario, model=replace(scenario.model, layers=timed), faults=tuple(faults))
    return scenario, workers_plan(scenario, _WORKERS, _SAMPLES, _HOW)


def course_of(record: RunRecord, faults: Sequence[Fault], loss: float) -> Course:
    """Return what a run shows, and the ``loss`` on held-out text that was found after it.

    A worker is away from a strike until it computes again.
    """
    worker_of = {name: index for index, name in enumerate(record.plan.devices)}
    ends_s: dict[int, list[float]] = {index: [] for index in worker_of.values()}
    for end_s, worker, _ in worker_steps(record.events):
        ends_s[worker].append(end_s)
    away = _away(record, faults, worker_of)
    lived_s = sum(max(own) for own in ends_s.values()) - sum(end - start for own in away.values() for start, end in own)
    samples = sum(len(own) * record.plan.pipelines[worker].samples for worker, own in ends_s.items())
    own_gaps = [
        later - earlier
        for worker, own in ends_s.items()
        for earlier, later in pairwise(sorted(own))
        if not any(start < later and earlier < end for start, end in away[worker])
    ]
    step_s = median(own_gaps)
    every = sorted(end_s for own in ends_s.values() for end_s in own)
    return Course(
        samples / lived_s,
        max(later - earlier for earlier, later in pairwise(every)) / step_s,
        max(own_gaps) / step_s,
        sum(end - start for own in away.values() for start, end in own),
        loss,
    )


def _away(
    record: RunRecord, faults: Sequence[Fault], worker_of: Mapping[str, int]
) -> dict[int, list[tuple[float, float]]]:
    """Return the intervals in which each worker was away, seconds of the run."""
    found: dict[int, list[tuple[float, float]]] = {index: [] for index in worker_of.values()}
    computed = [(event.device, event.start_s) for event in record.events if event.kind is EventKind.COMPUTE]
    end_s = max(event.end_s for event in record.events)
    for fault in faults:
        if isinstance(fault, Absence | Hang):
            back = (start_s for name, start_s in computed if name == fault.device and start_s > fault.start_s)
            found[worker_of[fault.device]].append((fault.start_s, min(back, default=end_s)))
    return found
