"""Measures the wall-clock time to a loss over links of regions: the plan that `auto` makes for it, and what people use.

Four ranks of this machine, each in a region of its own, train a small GPT of characters with real compute. The links
between the regions are emulated: 50 ms one way, and rates between 20 and 200 Mbit/s that vary by the second. The time
is that at which the loss on samples that no step has had reaches the same value, for the mean of the workers'
parameters or for the first worker's, whichever is lower.

`auto` gets what a user would give it: the times of the layers, measured by all ranks at once, and the file of a few
short runs that `ropebridge profile convergence` makes.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from statistics import mean, stdev

from safetensors.torch import load_file

from executor.backend import TorchBackend, choose_emulator
from executor.control.launcher import prepared_job, run_job
from executor.core.job import CheckpointConfig, RunConfig
from executor.recovery.export import parameters_by_step
from experiments.benches.regions.four_regions import (
    HAND_SET,
    REGIONS,
    STREAMING,
    best_pipeline,
    plan_by_hand,
    regions_scenario,
    with_measured_times,
)
from experiments.benches.regions.torch_diloco import END_FILE, PARAMETERS_FILE
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from experiments.profiles.convergence import ConvergenceConfig, profile_convergence
from experiments.profiles.unseen_loss import UnseenSamples
from planner.files.resolved_scenario import write_resolved_scenario
from planner.files.training import read_convergence
from planner.plan.plan import Plan, Synchronisation
from planner.runs.event_totals import step_ends_s
from planner.scenario.convergence import LossLaw
from planner.scenario.scenario import Scenario
from planner.systems.regional.loss_plan import TIME, LossGoal, LossPlan, mode_of
from planner.systems.regional.search import plan_to_loss
from traces.common.atomic import scratch_folder

# The loss to reach, and most steps of a run: as a multiple of those that the law of the loss expects, and at least so
# many intervals, so that workers have exchanged.
LOSS, _QUICK_LOSS = 2.3, 2.7
_MORE, _LEAST_INTERVALS = 1.2, 1.6
_SNAPSHOTS = 25
# The first of the samples whose loss is taken, far beyond those of any run here, and their number.
_NEVER_DRAWN, _UNSEEN = 10**9, 256
_SEEDS = 3
# Steps in which ropebridge's and torchft's streaming are compared.
_STREAMED_STEPS = 300
# Added to the seed of the links for those that `auto` plans with.
_OTHER_HOURS = 100

# The short runs for `auto`: steps and settings.
_PROFILE_STEPS, _QUICK_PROFILE_STEPS = 240, 100
_INTERVALS = "5,20"

LEAST_OF_SYNCHRONOUS, LEAST_OF_HAND_SET = 3.0, 1.15
MOST_OF_TORCHFT, MOST_DEVIATIONS = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The loss of the parameters that a run would have written if it had ended after ``step`` steps, at ``time_s``."""

    step: int
    time_s: float
    loss: float


@dataclass(frozen=True, slots=True)
class Trained:
    """A run: its snapshots, and the time at which it ended, seconds."""

    snapshots: Sequence[Snapshot]
    end_s: float


def measure_time_to_loss(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Train by every way with each seed until the loss is reached; compare the times."""
    assert choose_emulator("relay", tell) == "relay"
    loss, seeds = (_QUICK_LOSS, 1) if quick else (LOSS, _SEEDS)
    measured = with_measured_times(regions_scenario(0))
    law = _law(measured, quick, tell)
    rows: list[Row] = []
    times_s: defaultdict[str, list[float]] = defaultdict(list)
    streams: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in range(seeds):
        scenario = replace(regions_scenario(seed), model=measured.model)
        # What is known before the run are other hours of the same links.
        known = replace(regions_scenario(seed + _OTHER_HOURS), model=measured.model)
        best = plan_to_loss(known, LossGoal(TIME, loss, law)).best
        tell(f"auto, seed {seed}: {_words(best)}")
        plans: dict[str, Plan] = {
            "allreduce": plan_by_hand(scenario, Synchronisation()),
            "best pipeline": best_pipeline(scenario),
            "diloco, H = 500": plan_by_hand(scenario, HAND_SET),
            "auto": best.plan,
        }
        for name, plan in plans.items():
            steps = _steps(law, plan, loss)
            tell(f"{name}, seed {seed}: {steps} steps")
            trained = train(scenario, plan, steps, tell)
            to_loss_s = time_to_loss(trained.snapshots, loss)
            # A rival that has not reached the loss takes longer than its run.
            times_s[name].append(to_loss_s if plan is best.plan else min(to_loss_s, trained.end_s))
            rows.append(_row(name, seed, plan, trained, to_loss_s))
            tell(str(rows[-1]))
        plan = plan_by_hand(scenario, STREAMING)
        for name, program in (("streaming", train_whole), ("torchft's streaming", train_by_torch)):
            tell(f"{name}, seed {seed}: {_STREAMED_STEPS} steps")
            trained = program(scenario, plan, _STREAMED_STEPS, tell)
            streams[name].append((trained.end_s / _STREAMED_STEPS, trained.snapshots[-1].loss))
            rows.append(_row(name, seed, plan, trained, time_to_loss(trained.snapshots, loss)))
            tell(str(rows[-1]))
    return BenchResult(rows, _checks(times_s, streams))


def _law(scenario: Scenario, quick: bool, tell: Callable[[str], None]) -> LossLaw:
    """Return the law of the loss that `ropebridge profile convergence` finds."""
    with scratch_folder() as folder:
        named, output = folder / "scenario.json", folder / "convergence.json"
        write_resolved_scenario(scenario, named)
        config = ConvergenceConfig(
            str(named),
            methods="diloco,diloco-streaming",
            workers=str(len(REGIONS)),
            intervals=_INTERVALS,
            compressions="none,int8",
            momenta="0.9,0",
            steps=_QUICK_PROFILE_STEPS if quick else _PROFILE_STEPS,
            seeds=1,
        )
        for line in profile_convergence(config, output, as_json=False, tell=tell).splitlines():
            tell(line)
        entry = read_convergence(output).law
        assert entry is not None, "all runs have finished"
        return LossLaw(**vars(entry))


def train(scenario: Scenario, plan: Plan, steps: int, tell: Callable[[str], None]) -> Trained:
    """Train by a plan on the emulated links, and keep the parameters of some steps."""
    unseen = unseen_samples(scenario)
    with scratch_folder() as folder:
        checkpoints = CheckpointConfig(folder, _snapshot_every(steps), kept=_SNAPSHOTS + 1)
        backend = TorchBackend("real", emulator="relay", checkpoints=checkpoints, tell=tell)
        record = backend.run(scenario, plan, None, steps)
        ends_s = step_ends_s(record.events)
        # Long intervals take workers so far apart that each of them may be better than their mean.
        snapshots = [
            Snapshot(each.step, ends_s[each.step - 1], min(unseen.loss(each.mean), unseen.loss(each.own[0])))
            for each in parameters_by_step(folder, scenario)
        ]
    return Trained(snapshots, ends_s[-1])


def unseen_samples(scenario: Scenario) -> UnseenSamples:
    """Return samples that no run of the bench has had."""
    return UnseenSamples(scenario, _NEVER_DRAWN, _UNSEEN)


def train_whole(scenario: Scenario, plan: Plan, steps: int, tell: Callable[[str], None]) -> Trained:
    """Train by a plan on the emulated links without interruption, and keep the parameters of the end."""
    with scratch_folder() as folder:
        target = folder / "parameters.safetensors"
        record = TorchBackend("real", emulator="relay", parameters=target, tell=tell).run(scenario, plan, None, steps)
        end_s = step_ends_s(record.events)[-1]
        return Trained([Snapshot(steps, end_s, unseen_samples(scenario).loss(load_file(target)))], end_s)


def train_by_torch(scenario: Scenario, plan: Plan, steps: int, tell: Callable[[str], None]) -> Trained:
    """Train the same way by torchft's algorithm, see `experiments.benches.regions.torch_diloco`."""
    with prepared_job(scenario, plan, RunConfig("real", steps, "relay", adapts=False)) as job:
        run_job(job, plan.devices, module="experiments.benches.regions.torch_diloco")
        end_s = float((job.path / END_FILE).read_text())
        loss = unseen_samples(scenario).loss(load_file(job.path / PARAMETERS_FILE))
        return Trained([Snapshot(steps, end_s, loss)], end_s)


def _snapshot_every(steps: int) -> int:
    return max(1, steps // _SNAPSHOTS)


def _steps(law: LossLaw, plan: Plan, loss: float) -> int:
    """Return the number of steps of a run, a multiple of those between two snapshots."""
    least = _LEAST_INTERVALS * plan.synchronisation.interval_steps
    steps = max(_MORE * law.steps_to(loss, mode_of(plan)).expected, least)
    return _SNAPSHOTS * ceil(steps / _SNAPSHOTS)


def _words(best: LossPlan) -> str:
    how, outer = best.plan.synchronisation, best.plan.synchronisation.outer
    return (
        f"{len(best.plan.pipelines)} workers, {how.method}, an exchange after {how.interval_steps} steps, "
        f"{outer.fragments} fragments, overlap {outer.overlap_steps}: {best.steps.expected:.0f} steps of "
        f"{best.step_s:.3f} s"
    )


def _row(name: str, seed: int, plan: Plan, trained: Trained, to_loss_s: float) -> Row:
    last = trained.snapshots[-1]
    return {
        "way": name,
        "seed": seed,
        "workers": len(plan.pipelines),
        "method": plan.synchronisation.method,
        "interval": plan.synchronisation.interval_steps,
        "to_loss_s": to_loss_s if isfinite(to_loss_s) else "not reached",
        "step_s": trained.end_s / last.step,
        "steps": last.step,
        "last_loss": last.loss,
    }


def _checks(
    times_s: Mapping[str, Sequence[float]], streams: Mapping[str, Sequence[tuple[float, float]]]
) -> list[Check]:
    ours = times_s["auto"]
    checks = []
    for name, bar in (
        ("allreduce", LEAST_OF_SYNCHRONOUS),
        ("best pipeline", LEAST_OF_SYNCHRONOUS),
        ("diloco, H = 500", LEAST_OF_HAND_SET),
    ):
        # The ratio is 0 where the plan of auto has not reached the loss.
        ratios = [other / own for own, other in zip(ours, times_s[name], strict=True)]
        checks.append(at_least(f"time to the loss, {name} / auto, least of the seeds", min(ratios), bar))
    own, other = streams["streaming"], streams["torchft's streaming"]
    of_torchft = mean(one[0] / two[0] for one, two in zip(own, other, strict=True))
    checks.append(at_most("step of streaming / of torchft's", of_torchft, MOST_OF_TORCHFT))
    if len(own) > 1:
        noise = stdev(loss for _, loss in other)
        apart = abs(mean(loss for _, loss in own) - mean(loss for _, loss in other))
        checks.append(at_most("difference of their losses, deviations of seeds", apart / noise, MOST_DEVIATIONS))
    return checks


def time_to_loss(snapshots: Sequence[Snapshot], loss: float) -> float:
    """Return the time at which a run reaches a loss, seconds, linear between snapshots; infinite if it never does."""
    before: Snapshot | None = None
    for each in snapshots:
        if each.loss <= loss:
            if before is None:
                return each.time_s
            share = (before.loss - loss) / (before.loss - each.loss)
            return before.time_s + share * (each.time_s - before.time_s)
        before = each
    return inf
