"""Measures the wall-clock time to a loss over links of regions: the plan that `auto` makes for it, and what people use.

Four ranks of this machine, each in a region of its own, train a small GPT of characters with real compute. The links
between the regions are emulated: 50 ms one way, and rates between 20 and 200 Mbit/s that vary by the second. The time
is that at which the loss on held-out text reaches the same value, for the parameters that a run would have written if
it had ended then.

`auto` gets what a user would give it: the times of the layers, measured by all ranks at once, and the file of a few
short runs that `ropebridge profile convergence` makes.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from statistics import mean, stdev

import numpy as np
from safetensors.torch import load_file

from executor.backend import TorchBackend, choose_emulator
from executor.control.launcher import prepared_job, run_job
from executor.core.job import CheckpointConfig, RunConfig
from experiments.benches.regions.held_out import Snapshot, kept_checkpoints, time_to_loss
from experiments.benches.regions.separate_training import MODEL_FILE
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from experiments.benches.simulation.predicted import measured_profile, profile_of
from experiments.profiles.convergence import ConvergenceConfig, profile_convergence
from planner.files.resolved_scenario import write_resolved_scenario
from planner.files.training import read_convergence
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.event_totals import step_ends_s
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.convergence import LossLaw, TrainingMode
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer, Training
from planner.systems.regional.search import TIME, LossGoal, LossPlan, plan_to_loss
from planner.systems.registry import STRATEGIES, make_plan
from sim.simulator import Simulator
from traces.common.atomic import scratch_folder
from traces.common.errors import InputError
from traces.generators import ornstein_uhlenbeck
from traces.trace import LinkTrace

_ARGUMENTS = {"width": 128, "heads": 4, "blocks": 5, "length": 64}
_REGIONS = ("asia", "europe", "north", "south")
_SAMPLES = 8
_KIND = "this-machine"

# The links: one-way latency in seconds; rates in bits per second, their variation and how long they stay alike.
LATENCY_S = 0.05
LEAST_BPS, MOST_BPS, _MEAN_BPS = 20e6, 200e6, 80e6
_VARIATION, _CORRELATION_S, _TRACE_S = 0.6, 10.0, 600.0

# The loss to reach, and most steps of a run, as a multiple of those that the law of the loss expects.
LOSS, _QUICK_LOSS = 2.1, 2.5
_MORE = 1.3
_SNAPSHOTS = 25
_SEEDS = 3

# The short runs for `auto`: steps and settings.
_PROFILE_STEPS, _QUICK_PROFILE_STEPS = 240, 100
_INTERVALS = "5,20"

HAND_SET = Synchronisation("diloco", interval_steps=500)
# Equal settings for ropebridge's and torchft's streaming: torchft needs an interval that the fragments divide.
STREAMING = Synchronisation(
    "diloco-streaming", interval_steps=50, outer=OuterStep(fragments=2, pattern="strided", overlap_steps=5, mixing=0.5)
)

LEAST_OF_SYNCHRONOUS, LEAST_OF_HAND_SET = 3.0, 1.15
MOST_OF_TORCHFT, MOST_DEVIATIONS = 1.0, 2.0


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
        best = plan_to_loss(scenario, LossGoal(TIME, loss, law)).best
        tell(f"auto, seed {seed}: {_words(best)}")
        plans: dict[str, Plan] = {
            "allreduce": workers_plan(scenario, Synchronisation()),
            "best pipeline": best_pipeline(scenario),
            "diloco, H = 500": workers_plan(scenario, HAND_SET),
            "auto": best.plan,
        }
        for name, plan in plans.items():
            steps = _steps(law, plan, loss)
            tell(f"{name}, seed {seed}: {steps} steps")
            trained = train(scenario, plan, steps, tell)
            times_s[name].append(time_to_loss(trained.snapshots, loss))
            rows.append(_row(name, seed, plan, trained, times_s[name][-1]))
            tell(str(rows[-1]))
        steps = _steps(law, workers_plan(scenario, STREAMING), loss)
        for name, program in (("streaming", train), ("torchft's streaming", train_by_torch)):
            plan = workers_plan(scenario, STREAMING)
            tell(f"{name}, seed {seed}: {steps} steps")
            trained = program(scenario, plan, steps, tell)
            streams[name].append((trained.end_s / steps, trained.snapshots[-1].loss))
            rows.append(_row(name, seed, plan, trained, time_to_loss(trained.snapshots, loss)))
            tell(str(rows[-1]))
    return BenchResult(rows, _checks(times_s, streams))


def regions_scenario(seed: int) -> Scenario:
    """Return the scenario of four regions, whose links differ by ``seed`` and direction; layers have no times yet."""
    code = ModelCode(MODEL_FILE, _ARGUMENTS)
    unused = TimeTable((_SAMPLES,), (1.0,), (1.0,), (1.0,))
    devices = tuple(Device(f"gpu-{region}", _KIND, region, 2**33) for region in _REGIONS)
    links = []
    for number, (one, other) in enumerate((a, b) for a in _REGIONS for b in _REGIONS if a != b):
        trace = _trace(1000 * seed + number)
        links.append(Link(one, other, trace.mean_bps, LATENCY_S, trace))
    training = Training(_SAMPLES * len(_REGIONS), optimizer=Optimizer("adamw", 0.002), seed=seed)
    model = profile_of(code, {_KIND: unused})
    return Scenario("four-regions", Cluster(devices, tuple(links)), model, training, code)


def _trace(seed: int) -> LinkTrace:
    made = ornstein_uhlenbeck(
        _MEAN_BPS,
        coefficient_of_variation=_VARIATION,
        correlation_s=_CORRELATION_S,
        maximum_bps=MOST_BPS,
        duration_s=_TRACE_S,
        seed=seed,
    )
    return LinkTrace(made.times_s, np.maximum(made.bandwidth_bps, LEAST_BPS), made.duration_s)


def with_measured_times(scenario: Scenario) -> Scenario:
    """Return the scenario with times of the layers that all of its ranks measure at once on this machine."""
    return replace(scenario, model=measured_profile(scenario, workers_plan(scenario, Synchronisation())))


def _law(scenario: Scenario, quick: bool, tell: Callable[[str], None]) -> LossLaw:
    """Return the law of the loss that `ropebridge profile convergence` finds."""
    with scratch_folder() as folder:
        named, output = folder / "scenario.json", folder / "convergence.json"
        write_resolved_scenario(scenario, named)
        config = ConvergenceConfig(
            str(named),
            methods="diloco-streaming",
            workers=str(len(_REGIONS)),
            intervals=_INTERVALS,
            compressions="none",
            momenta="0.9,0",
            steps=_QUICK_PROFILE_STEPS if quick else _PROFILE_STEPS,
            seeds=1,
        )
        for line in profile_convergence(config, output, as_json=False, tell=tell).splitlines():
            tell(line)
        entry = read_convergence(output).law
        assert entry is not None, "all runs have finished"
        return LossLaw(**vars(entry))


def workers_plan(scenario: Scenario, how: Synchronisation) -> Plan:
    """Return the plan of a worker in each region, each with all layers and equally many samples."""
    layers = len(scenario.model.layers)
    pipelines = tuple(
        Pipeline((Stage(0, layers, (Replica(device.name),), 1),), (_SAMPLES,)) for device in scenario.cluster.devices
    )
    return Plan(scenario.name, scenario.model.name, "by hand", "1f1b", pipelines, synchronisation=how)


def best_pipeline(scenario: Scenario) -> Plan:
    """Return the plan with the shortest simulated step among the strategies' pipelines across regions."""
    found: list[tuple[float, int, Plan]] = []
    for number, name in enumerate(STRATEGIES):
        try:
            plan = make_plan(name, scenario)
        except InputError:
            continue
        if len(plan.pipelines) == 1 and len(plan.pipelines[0].stages) > 1:
            found.append((measure(Simulator().run(scenario, plan, None, 10)).step_s, number, plan))
    return min(found)[2]


def train(scenario: Scenario, plan: Plan, steps: int, tell: Callable[[str], None]) -> Trained:
    """Train by a plan on the emulated links, and keep the parameters of some steps."""
    with scratch_folder() as folder, kept_checkpoints(scenario, folder) as kept:
        checkpoints = CheckpointConfig(folder, _snapshot_every(steps))
        backend = TorchBackend("real", emulator="relay", checkpoints=checkpoints, tell=tell)
        record = backend.run(scenario, plan, None, steps)
    ends_s = step_ends_s(record.events)
    snapshots = [Snapshot(scenario, step, ends_s[step - 1], kept[step]) for step in sorted(kept)]
    return Trained(snapshots, ends_s[-1])


def train_by_torch(scenario: Scenario, plan: Plan, steps: int, tell: Callable[[str], None]) -> Trained:
    """Train the same way by torchft's algorithm, see `experiments.benches.regions.torch_diloco`."""
    config = RunConfig("real", steps, "relay", adapts=False, checkpoint_every=_snapshot_every(steps))
    with prepared_job(scenario, plan, config) as job:
        run_job(job, plan.devices, module="experiments.benches.regions.torch_diloco")
        ends_s: Mapping[str, float] = json.loads((job.path / "times.json").read_text())
        snapshots = [
            Snapshot(scenario, int(step), end_s, load_file(job.path / f"step-{step}.safetensors"))
            for step, end_s in ends_s.items()
        ]
    return Trained(snapshots, snapshots[-1].time_s)


def _snapshot_every(steps: int) -> int:
    return max(1, steps // _SNAPSHOTS)


def _steps(law: LossLaw, plan: Plan, loss: float) -> int:
    """Return the number of steps of a run, a multiple of those between two snapshots."""
    how = plan.synchronisation
    workers = len(plan.pipelines) if how.has_outer_step else 1
    outer = how.outer if how.has_outer_step else OuterStep()
    settings = (outer.fragments, outer.compression, outer.momentum)
    mode = TrainingMode(how.method, plan.global_batch, workers, how.interval_steps, *settings)
    return _SNAPSHOTS * ceil(_MORE * law.steps_to(loss, mode).expected / _SNAPSHOTS)


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
        # A rival that did not reach the loss took longer than any time; auto that did not has lost.
        ratios = [0.0 if own == inf else other / own for own, other in zip(ours, times_s[name], strict=True)]
        checks.append(at_least(f"time to the loss, {name} / auto, least of the seeds", min(ratios), bar))
    own, other = streams["streaming"], streams["torchft's streaming"]
    of_torchft = mean(one[0] / two[0] for one, two in zip(own, other, strict=True))
    checks.append(at_most("step of streaming / of torchft's", of_torchft, MOST_OF_TORCHFT))
    if len(own) > 1:
        noise = stdev(loss for _, loss in other)
        apart = abs(mean(loss for _, loss in own) - mean(loss for _, loss in other))
        checks.append(at_most("difference of their losses, deviations of seeds", apart / noise, MOST_DEVIATIONS))
    return checks
