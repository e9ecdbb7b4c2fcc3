"""Measures what training in regions costs in loss: every method beside sums of gradients in each step, equal samples.

Two and four ranks of this machine, each a worker with its share of the samples, train a small language model of
characters with different numbers of steps between exchanges; with compressed messages, each of two ranks has half of
the layers. The loss is measured on text that was held out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.training.models.loading import load_model
from experiments.benches.cases import two_stage_plan, workers_plan
from experiments.benches.kept import KeptResults
from experiments.benches.result import BenchResult, Check, Row, at_most
from experiments.benches.simulation.predicted import profile_of
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan, Synchronisation
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import COMPRESSIONS, LearningRateSchedule, Optimizer, Training
from traces.common.atomic import scratch_folder

MODEL_FILE = Path(__file__).parents[2] / "models" / "characters.py"
KIND, HUB = "worker", "hub"
_ARGUMENTS = {"width": 128, "heads": 4, "blocks": 5}
_SAMPLES, _LEARNING_RATE = 16, 0.002
_STEPS, _WORKERS, _INTERVALS, _SEEDS = 1000, (2, 4), (10, 50, 200), 3
_QUICK_STEPS, _QUICK_WORKERS, _QUICK_INTERVALS = 300, (2,), (10, 50)

# The bars: the loss of ``diloco`` with this interval, as a multiple of the synchronous one; and that of sparse
# exchanges, as a multiple of the loss of ``diloco`` with as many workers and the same interval.
_BAR_INTERVAL, MOST_OF_SYNCHRONOUS, MOST_OF_DILOCO = 50, 1.03, 1.02

_SYNCHRONOUS, _DILOCO, _SPARSE = "allreduce", "diloco", "sparse: 2 % in int4, no momentum"


def methods(interval: int) -> Iterator[tuple[str, Synchronisation]]:
    """Yield the methods that exchange after every ``interval`` steps, by name."""
    streams = OuterStep(fragments=3, pattern="strided", overlap_steps=min(5, interval // 4), mixing=0.5)
    averages = OuterStep(learning_rate=1.0, momentum=0.0)
    for name, method, outer in (
        (_DILOCO, "diloco", OuterStep()),
        ("averages", "diloco", averages),
        (_SPARSE, "diloco", replace(averages, compression="int4", density=0.02, feedback=0.95)),
        ("streaming", "diloco-streaming", streams),
        ("streaming, int4", "diloco-streaming", replace(streams, compression="int4")),
        ("decoupled", "diloco-decoupled", replace(streams, quorum=1, grace_s=None, syncers=(HUB,))),
    ):
        yield name, Synchronisation(method, interval_steps=interval, outer=outer)


@dataclass(frozen=True, slots=True)
class _Case:
    """A way to train; one pipeline over two devices has no workers."""

    name: str
    workers: int
    interval: int
    plan: Callable[[Scenario], Plan]


def measure_separate_training(
    quick: bool, tell: Callable[[str], None], count: int | None = None, keep: Path | None = None
) -> BenchResult:
    """Train by every method with ``count`` seeds; compare the losses on held-out text with the synchronous ones.

    If a folder ``keep`` is given, every run is kept there, and runs that it has already are not repeated.
    """
    kept = KeptResults(keep)
    steps, seeds = (_QUICK_STEPS, count or 1) if quick else (_STEPS, count or _SEEDS)
    rows: list[Row] = []
    losses: dict[tuple[str, int, int], list[float]] = {}
    synchronous: list[float] = []
    for case in _cases(quick):
        own, sent_bytes = [], 0.0
        for seed in range(seeds):
            tell(f"{case.name}, {case.workers} workers, {case.interval} steps between exchanges, seed {seed}")
            loss, sent_bytes = _kept_or_trained(kept, case, seed, steps)
            own.append(loss)
        synchronous = synchronous or own
        losses[case.name, case.workers, case.interval] = own
        ratios = _ratios(own, synchronous)
        rows.append(
            {
                "method": case.name,
                "workers": case.workers,
                "interval": case.interval,
                "loss": mean(own),
                "to_synchronous": mean(ratios),
                "deviation": stdev(ratios) if len(ratios) > 1 else 0.0,
                "sent_mb": sent_bytes / 1e6,
            }
        )
        tell(str(rows[-1]))
    return BenchResult(rows, list(_checks(losses, synchronous)))


def _cases(quick: bool) -> Iterator[_Case]:
    yield _Case(_SYNCHRONOUS, 2, 1, partial(_workers, Synchronisation()))
    for workers in _QUICK_WORKERS if quick else _WORKERS:
        for interval in _QUICK_INTERVALS if quick else _INTERVALS:
            for name, how in methods(interval):
                yield _Case(name, workers, interval, partial(_workers, how))
    for compression in COMPRESSIONS:
        yield _Case(f"two stages, {compression}", 0, 1, partial(_two_stages, compression))


def _ratios(own: Sequence[float], others: Sequence[float]) -> list[float]:
    return [loss / other for loss, other in zip(own, others, strict=True)]


def _checks(losses: dict[tuple[str, int, int], list[float]], synchronous: Sequence[float]) -> Iterator[Check]:
    sparse = []
    for (name, workers, interval), own in losses.items():
        if name == _DILOCO and interval == _BAR_INTERVAL:
            ratio = mean(_ratios(own, synchronous))
            yield at_most(
                f"loss of diloco, {workers} workers, {interval} steps / synchronous", ratio, MOST_OF_SYNCHRONOUS
            )
        if name == _SPARSE:
            sparse.append(mean(_ratios(own, losses[_DILOCO, workers, interval])))
    yield at_most(
        "loss of sparse exchanges / of diloco, most of all workers and intervals", max(sparse), MOST_OF_DILOCO
    )


def run_name(method: str, workers: int, interval: int, steps: int, seed: int) -> str:
    """Return the name of a run among those that are kept.

    >>> run_name("streaming, int4", 2, 50, 1000, 0)
    'streaming, int4-2-50-1000-0'
    """
    return f"{method}-{workers}-{interval}-{steps}-{seed}"


def _kept_or_trained(kept: KeptResults, case: _Case, seed: int, steps: int) -> tuple[float, float]:
    """Return the result of `_train`, which is kept under `run_name`."""
    name = run_name(case.name, case.workers, case.interval, steps, seed)
    document = kept.read(name)
    if document is None:
        loss, sent_bytes = _train(case, seed, steps)
        kept.write(name, {"loss": loss, "sent_bytes": sent_bytes})
        return loss, sent_bytes
    try:
        return float(document["loss"]), float(document["sent_bytes"])
    except (LookupError, TypeError, ValueError) as error:
        raise kept.damaged(name) from error


def _train(case: _Case, seed: int, steps: int) -> tuple[float, float]:
    """Return the loss on held-out text after training, and the bytes sent between the devices."""
    names = [f"worker-{number}" for number in range(case.workers or 2)]
    scenario = character_scenario(names, seed, steps, _SAMPLES, _ARGUMENTS)
    with scratch_folder() as folder:
        target = folder / "parameters.safetensors"
        backend = TorchBackend("real", emulator="none", parameters=target)
        record = backend.run(scenario, case.plan(scenario), None, steps)
        return held_out_loss(scenario, load_file(target)), measure(record).wan_bytes


def _workers(how: Synchronisation, scenario: Scenario) -> Plan:
    """Return the plan of a worker on each device but the hub, each with all layers and equally many samples."""
    names = _trainers(scenario)
    return workers_plan(scenario, names, _SAMPLES // len(names), how)


def _two_stages(compression: str, scenario: Scenario) -> Plan:
    """Return the plan of one pipeline with half of the layers on each device."""
    plan = two_stage_plan(scenario, "1f1b", (_SAMPLES // 4,) * 4, (2, 1), "scheduled", _trainers(scenario))
    return replace(plan, compression=compression)


def _trainers(scenario: Scenario) -> list[str]:
    return [device.name for device in scenario.cluster.devices if device.name != HUB]


def character_scenario(
    names: Sequence[str], seed: int, steps: int, samples: int, arguments: dict[str, int] | None = None
) -> Scenario:
    """Return the scenario of devices and a hub, each in a region, that train for so many steps of so many samples.

    ``arguments`` are those of the model's size.
    """
    code = ModelCode(MODEL_FILE, arguments or {})
    # The times are never used: the plan is written by hand.
    unused = TimeTable((1,), (0.01,), (0.01,), (0.01,))
    warmup_steps = steps // 10
    schedule = LearningRateSchedule("cosine", warmup_steps, steps - warmup_steps, final_share=0.1)
    rule = Optimizer("adamw", _LEARNING_RATE, schedule=schedule)
    devices = tuple(Device(name, KIND, f"region-{name}", 2**36) for name in (*names, HUB))
    regions = [device.region for device in devices]
    links = tuple(Link(one, other, 1e9, 0.0) for one in regions for other in regions if one != other)
    training = Training(samples, optimizer=rule, seed=seed)
    return Scenario("workers", Cluster(devices, links), profile_of(code, {KIND: unused}), training, code)


def held_out_loss(scenario: Scenario, parameters: Mapping[str, torch.Tensor]) -> float:
    """Return the loss of a scenario's model with these parameters on the text that is held out of training."""
    assert scenario.code is not None, "the model has text"
    model = load_model(scenario.code, 0)
    inputs, targets = model.held_out()  # type: ignore[attr-defined]
    layers = torch.nn.Sequential(*model.layers)
    layers.load_state_dict(dict(parameters))
    with torch.no_grad():
        return float(model.loss(layers(inputs), targets))
