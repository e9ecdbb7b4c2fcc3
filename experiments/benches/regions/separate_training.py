"""Measures what training in regions costs in loss: DiLoCo beside a sum of gradients in every step, at equal samples.

Two ranks of this machine, each a worker with half of the samples, train a small language model of characters; with
compressed messages, each rank has half of the layers. The loss is measured on text that was held out.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from safetensors.torch import load_file

from executor.backend import TorchBackend
from experiments.benches.cases import TWO_DEVICES, trained_scenario, two_stage_plan, workers_plan
from experiments.benches.regions.held_out import held_out_loss
from experiments.benches.result import BenchResult, Row, at_most
from experiments.benches.simulation.predicted import profile_of
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan, Synchronisation
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster, Device
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import COMPRESSIONS, LearningRateSchedule, Optimizer
from traces.common.atomic import scratch_folder

MODEL_FILE = Path(__file__).parents[2] / "models" / "characters.py"
HUB = "hub"
_SAMPLES, _QUICK_STEPS, _STEPS, _SEEDS = 32, 300, 1000, 3
_LEARNING_RATE = 0.002

# The most by which the loss with an exchange every 50 steps may exceed that of synchronous training, as a ratio.
MOST_RATIO = 1.03

_STREAMS = OuterStep(fragments=3, pattern="strided", overlap_steps=5, mixing=0.5)
METHODS: Mapping[str, Synchronisation] = {
    "allreduce": Synchronisation(),
    "averaging, 50 steps": Synchronisation("ma", interval_steps=50, staleness_bound=0),
    "diloco, 10 steps": Synchronisation("diloco", interval_steps=10),
    "diloco, 50 steps": Synchronisation("diloco", interval_steps=50),
    "streaming, 50 steps": Synchronisation("diloco-streaming", interval_steps=50, outer=_STREAMS),
    "streaming, 50 steps, int4": Synchronisation(
        "diloco-streaming", interval_steps=50, outer=replace(_STREAMS, compression="int4")
    ),
    "decoupled, 50 steps": Synchronisation(
        "diloco-decoupled", interval_steps=50, outer=replace(_STREAMS, quorum=1, syncers=(HUB,))
    ),
    "diloco, 10 steps, 2 % int4, no momentum": Synchronisation(
        "diloco",
        interval_steps=10,
        outer=OuterStep(learning_rate=1.0, momentum=0.0, compression="int4", density=0.02, feedback=0.95),
    ),
}


def measure_separate_training(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Train by every method with each seed; compare the losses on held-out text with those of synchronous training."""
    plans: dict[str, Callable[[Scenario], Plan]] = {name: partial(_workers, how) for name, how in METHODS.items()}
    plans |= {f"two stages, {compression}": partial(_two_stages, compression) for compression in COMPRESSIONS}
    steps, seeds = (_QUICK_STEPS, 1) if quick else (_STEPS, _SEEDS)
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    synchronous: list[float] = []
    for name, plan_for in plans.items():
        losses, sent_bytes = [], 0.0
        for seed in range(seeds):
            tell(f"{name}: {steps} steps, seed {seed}")
            loss, sent_bytes = _train(plan_for, seed, steps)
            losses.append(loss)
        synchronous = synchronous or losses
        each = [loss / other for loss, other in zip(losses, synchronous, strict=True)]
        ratios[name] = mean(each)
        rows.append(
            {
                "method": name,
                "loss": mean(losses),
                "to_synchronous": ratios[name],
                "deviation": stdev(each) if len(each) > 1 else 0.0,
                "sent_mb": sent_bytes / 1e6,
            }
        )
    return BenchResult(
        rows, [at_most("loss of diloco, 50 steps / synchronous loss", ratios["diloco, 50 steps"], MOST_RATIO)]
    )


def _train(plan_for: Callable[[Scenario], Plan], seed: int, steps: int) -> tuple[float, float]:
    """Return the loss on held-out text after training, and the bytes sent between the devices."""
    scenario = character_scenario(seed, steps, _SAMPLES)
    with scratch_folder() as folder:
        target = folder / "parameters.safetensors"
        backend = TorchBackend("real", emulator="none", parameters=target)
        record = backend.run(scenario, plan_for(scenario), None, steps)
        return held_out_loss(scenario, load_file(target)), measure(record).wan_bytes


def _workers(how: Synchronisation, scenario: Scenario) -> Plan:
    """Return the plan of two workers, each with all layers and half of the samples."""
    return workers_plan(scenario, TWO_DEVICES, _SAMPLES // len(TWO_DEVICES), how)


def _two_stages(compression: str, scenario: Scenario) -> Plan:
    """Return the plan of one pipeline with half of the layers on each device."""
    plan = two_stage_plan(scenario, "1f1b", (_SAMPLES // 4,) * 4, (2, 1), "scheduled")
    return replace(plan, compression=compression)


def character_scenario(seed: int, steps: int, samples: int) -> Scenario:
    """Return the scenario of two devices that train the model, for so many steps of so many samples, and of a hub."""
    code = ModelCode(MODEL_FILE, {})
    # The times are never used: the plan is written by hand.
    unused = TimeTable((1,), (0.01,), (0.01,), (0.01,))
    warmup_steps = steps // 10
    schedule = LearningRateSchedule("cosine", warmup_steps, steps - warmup_steps, final_share=0.1)
    rule = Optimizer("adamw", _LEARNING_RATE, schedule=schedule)
    scenario = trained_scenario(profile_of(code, dict.fromkeys(TWO_DEVICES, unused)), code, samples, rule)
    first = scenario.cluster.links[0]
    ends = [(device.region, f"region-{HUB}") for device in scenario.cluster.devices]
    links = (replace(first, source=one, target=other) for pair in ends for one, other in (pair, pair[::-1]))
    hub = Device(HUB, HUB, f"region-{HUB}", 2**36)
    cluster = Cluster((*scenario.cluster.devices, hub), (*scenario.cluster.links, *links))
    return replace(scenario, cluster=cluster, training=replace(scenario.training, seed=seed))
