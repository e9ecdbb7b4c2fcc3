"""Compares simulated with real step times, in cases with many pipelines, schedules, links, traces and policies."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from executor.backend import TorchBackend, choose_emulator
from experiments.benches.cases import played
from experiments.benches.result import BenchResult, Row, at_least, at_most
from experiments.benches.simulation.predicted import ROUNDS, predict_real_compute
from experiments.runs.scenario import choose_scenario
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.effects import WIDE_AREA_TCP, Effects
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.scenario.training import Training
from planner.systems.registry import POLICIES, STRATEGIES, make_plan, make_policy
from sim.simulator import Simulator
from traces.formats import read_trace
from traces.generators.presets import preset
from traces.trace import LinkTrace

# Environment variable that names the folder of recorded traces, which are not part of the project.
VARIABLE = "ROPEBRIDGE_TRACES"
BROADBAND = "fcc_mba_2016/traces"

# TCP settings of the test bed's hosts, see executor/wan/linux.py.
EFFECTS = Effects(network=WIDE_AREA_TCP)
STEPS = 12
STEPS_ON_TRACES = 20
LOCAL = (1e9, 0.0005)


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration to run in both backends; its scenario includes TCP's effects, as emulated links have them."""

    name: str
    scenario: Scenario
    plan: Plan
    policy: str = "none"
    steps: int = STEPS


@dataclass(frozen=True, slots=True)
class Stages:
    """A hand-made pipeline with each stage in its own region.

    Attributes:
        forward_s: Forward time of one sample in each stage, seconds; the input gradient takes as long, the weight
            gradient 0.8 times as long.
        links: Rate in bits per second, or a trace, and one-way latency in seconds, between neighbouring stages.
        shares: Shares of the samples that each stage's replicas take; None for one replica in each stage.
        output_bytes: Bytes of one sample between two stages.
        slower: Factor by which each further replica of a stage is slower than the previous one.
    """

    forward_s: Sequence[float]
    links: Sequence[tuple[float | LinkTrace, float]]
    shares: Sequence[Sequence[float]] | None = None
    output_bytes: int = 500_000
    parameter_bytes: int = 400_000
    slower: float = 1.5


def fidelity_cases(tell: Callable[[str], None]) -> list[Case]:
    """Return all cases; leave out those on recorded traces if there is no folder of them, and report this."""
    return [
        *_latencies(),
        *_unlike_stages(),
        *_replicas(),
        *_several_pipelines(),
        *_swaying(),
        *_recorded(tell),
        *_planned(),
    ]


def _latencies() -> Iterator[Case]:
    for latency_s in (0.010, 0.025, 0.050):
        stages = Stages([0.02, 0.02], [(400e6, latency_s)], output_bytes=1_000_000)
        name = f"two-{1000 * latency_s:.0f}ms"
        yield _case(f"{name}-1f1b", stages, (1,) * 8, [2, 1], "1f1b")
        yield _case(f"{name}-compact-zb", stages, (1,) * 8, [8, 8], "compact-zb")
        yield _case(f"{name}-dynamic", stages, (1,) * 8, [6, 6], "compact-zb", order="dynamic")
    stages = Stages([0.02, 0.02], [(400e6, 0.05)], output_bytes=3_000_000)
    yield _case("window", stages, (1,) * 8, [8, 8], "1f1b")
    yield _case("window-four-connections", stages, (1,) * 8, [8, 8], "1f1b", connections=4)


def _unlike_stages() -> Iterator[Case]:
    stages = Stages([0.012, 0.03, 0.018, 0.025], [(150e6, 0.03), (80e6, 0.012), (300e6, 0.045)])
    for schedule, depths in (
        ("gpipe", [6] * 4),
        ("1f1b", [4, 3, 2, 1]),
        ("zb-h1", [4, 3, 2, 1]),
        ("compact-zb", [6, 6, 4, 3]),
    ):
        yield _case(f"four-unlike-{schedule}", stages, (1,) * 10, depths, schedule)
    yield _case("four-unlike-uneven", stages, (3, 1, 2, 2, 1, 3), [4, 3, 2, 1], "1f1b")
    uneasy = Stages([0.02, 0.03, 0.025], [(100e6, 0.02), (100e6, 0.02)])
    yield _on_links(_case("three-jitter", uneasy, (1,) * 8, [6, 4, 2], "1f1b"), jitter_s=0.004)
    # Loss of one packet in a thousand: TCP reaches a tenth of the link's rate.
    torn = Stages([0.02, 0.02], [(100e6, 0.02)], output_bytes=200_000)
    yield _on_links(_case("two-loss", torn, (1,) * 8, [6, 4], "1f1b", steps=STEPS_ON_TRACES), loss=0.001)
    narrow = Stages([0.02, 0.025], [(60e6, 0.02)], output_bytes=600_000)
    for compression in ("none", "bf16", "int8"):
        yield _case(f"narrow-{compression}", narrow, (1,) * 8, [6, 4], "1f1b", compression=compression)
    eight = Stages([0.02, 0.03, 0.015, 0.02] * 2, [(200e6, 0.01)] * 7, output_bytes=200_000)
    yield _case("eight-stages", eight, (1,) * 12, [10, 8, 8, 6, 6, 4, 4, 2], "compact-zb")


def _replicas() -> Iterator[Case]:
    asymmetric = Stages([0.01, 0.02], [(200e6, 0.02)], [[2.0, 1.0], [1.0]])
    yield _case("two-replicas-and-one", asymmetric, (6,) * 6, [3, 1], "1f1b")
    wide = Stages([0.01, 0.012], [(200e6, 0.02)], [[2.0, 1.0, 1.0], [1.0, 1.0]])
    yield _case("three-replicas-and-two", wide, (8,) * 4, [2, 1], "zb-h1")


def _several_pipelines() -> Iterator[Case]:
    stages = Stages([0.05], [], parameter_bytes=3_000_000)
    for algorithm in ("ring", "hierarchical"):
        yield _pipelines(f"data-parallel-{algorithm}", stages, Synchronisation(algorithm=algorithm))
    yield _pipelines("data-parallel-overlapping", stages, Synchronisation(bucket_bytes=1), layers=3)
    slow = Stages([0.1], [], parameter_bytes=1_500_000)
    yield _pipelines("asgd", slow, Synchronisation("asgd", staleness_bound=2))
    yield _pipelines("asgd-ga", slow, Synchronisation("asgd-ga", interval_steps=4, staleness_bound=4))
    yield _pipelines("ma", slow, Synchronisation("ma", interval_steps=4, staleness_bound=0))


def _swaying() -> Iterator[Case]:
    for name, mean_bps in (("lte", 60e6), ("5g", 120e6)):
        trace = played(preset(name, duration_s=60.0, seed=5), mean_bps)
        stages = Stages([0.03, 0.02, 0.03], [(trace, 0.02), (200e6, 0.01)])
        yield _case(f"fluctuating-{name}", stages, (1,) * 10, [8, 6, 3], "1f1b", steps=STEPS_ON_TRACES)
        yield _case(
            f"fluctuating-{name}-dynamic", stages, (1,) * 10, [8, 6, 3], "zb-h1", order="dynamic", steps=STEPS_ON_TRACES
        )


def _recorded(tell: Callable[[str], None]) -> Iterator[Case]:
    folder = Path(os.environ.get(VARIABLE, "")) / BROADBAND
    if VARIABLE not in os.environ or not folder.is_dir():
        tell(f"cases recorded-* are skipped: {BROADBAND} is in no folder that {VARIABLE} names")
        return
    # Fixed broadband of about 1 Mbit/s, a rate every 5 s: played ten times as fast, scaled to 60 Mbit/s.
    for number, path in enumerate(sorted(folder.iterdir())[5:20:5]):
        trace = played(read_trace(path), 60e6, speed=10)
        stages = Stages([0.03, 0.03], [(trace, 0.015 * (number + 1))])
        yield _case(f"recorded-{number}-1f1b", stages, (1,) * 8, [6, 3], "1f1b", steps=STEPS_ON_TRACES)
        yield _case(
            f"recorded-{number}-dynamic", stages, (1,) * 8, [6, 6], "compact-zb", order="dynamic", steps=STEPS_ON_TRACES
        )


def _planned() -> Iterator[Case]:
    """Yield a case for every strategy and every policy; no device fails (see ``ropebridge bench recovery``)."""
    starts = {"depth": "megatron", "cannikin": "ddp", "deepcee": "deepcee", "auto": "auto", "cloudless": "cloudless"}
    for scenario_name, strategy, policy in (
        ("two-regions", "megatron", "none"),
        ("two-regions", "pipedream", "depth"),
        *(("cloud-edge-end-small", strategy, "none") for strategy in STRATEGIES),
        *(("cloud-edge-end-small", starts.get(policy, "asteroid"), policy) for policy in POLICIES if policy != "none"),
    ):
        scenario = replace(choose_scenario(scenario_name), effects=EFFECTS)
        yield Case(
            f"{scenario_name}-{strategy}-{policy}", scenario, make_plan(strategy, scenario), policy, STEPS_ON_TRACES
        )


def _case(
    name: str,
    stages: Stages,
    microbatches: tuple[int, ...],
    depths: Sequence[int],
    schedule: str,
    *,
    steps: int = STEPS,
    **options: Any,
) -> Case:
    """Return a case with a hand-made plan; ``options`` are further fields of the plan, such as ``order``."""
    scenario = _scenario(name, stages, sum(microbatches))
    built = tuple(
        Stage(index, index + 1, tuple(Replica(f"device-{index}-{n}", share) for n, share in enumerate(each)), depth)
        for index, (each, depth) in enumerate(zip(stages.shares or [[1.0]] * len(depths), depths, strict=True))
    )
    plan = Plan(name, scenario.model.name, "by hand", schedule, (Pipeline(built, microbatches),), **options)
    return Case(name, scenario, plan, steps=steps)


def _on_links(case: Case, jitter_s: float = 0.0, loss: float = 0.0) -> Case:
    """Return the case with packet jitter and loss on the links between regions."""
    links = tuple(
        link if link.source == link.target else replace(link, jitter_s=jitter_s, loss=loss)
        for link in case.scenario.cluster.links
    )
    cluster = Cluster(case.scenario.cluster.devices, links)
    return replace(case, scenario=replace(case.scenario, cluster=cluster))


def _scenario(name: str, stages: Stages, batch: int) -> Scenario:
    devices, tables = [], []
    for index, forward_s in enumerate(stages.forward_s):
        times = {}
        for number in range(len(stages.shares[index]) if stages.shares else 1):
            kind = f"kind-{index}-{number}"
            devices.append(Device(f"device-{index}-{number}", kind, f"region-{index}", 2**36))
            times[kind] = _table(forward_s * stages.slower**number)
        tables.append(times)
    links = [Link(f"region-{index}", f"region-{index}", *LOCAL) for index in range(len(stages.forward_s))]
    for index, (rate, latency_s) in enumerate(stages.links):
        links += _both_ways(f"region-{index}", f"region-{index + 1}", rate, latency_s)
    layers = tuple(
        LayerProfile(f"layer-{n}", stages.parameter_bytes, stages.output_bytes, stages.output_bytes, times)
        for n, times in enumerate(tables)
    )
    cluster = Cluster(tuple(devices), tuple(links))
    return Scenario(name, cluster, ModelProfile(name, layers), Training(batch), effects=EFFECTS)


def _both_ways(one: str, other: str, rate: float | LinkTrace, latency_s: float) -> list[Link]:
    trace = rate if isinstance(rate, LinkTrace) else None
    bandwidth_bps = trace.mean_bps if trace is not None else rate
    assert isinstance(bandwidth_bps, float)
    return [Link(a, b, bandwidth_bps, latency_s, trace) for a, b in ((one, other), (other, one))]


def _table(forward_s: float) -> TimeTable:
    return TimeTable((1,), (forward_s,), (forward_s,), (0.8 * forward_s,))


def _pipelines(name: str, stages: Stages, how: Synchronisation, layers: int = 1) -> Case:
    """Return a case of pipelines with one stage of ``layers`` equal layers, in two regions, with unequal batches."""
    per_region = 2 if how.method == "allreduce" else 1
    (forward_s,) = stages.forward_s
    devices, times = [], {}
    for index in range(2 * per_region):
        kind = f"kind-{index}"
        devices.append(Device(f"device-{index}", kind, f"region-{index // per_region}", 2**36))
        times[kind] = _table(forward_s / layers * (1 + 0.25 * index))
    links = [Link(f"region-{index}", f"region-{index}", *LOCAL) for index in range(2)]
    links += _both_ways("region-0", "region-1", 100e6, 0.02)
    layer = LayerProfile("layer", stages.parameter_bytes // layers, 1000, 1000, times)
    batches = [4, 3, 3, 2][: len(devices)]
    scenario = Scenario(
        name,
        Cluster(tuple(devices), tuple(links)),
        ModelProfile(name, (layer,) * layers),
        Training(sum(batches)),
        effects=EFFECTS,
    )
    built = tuple(
        Pipeline((Stage(0, layers, (Replica(device.name),), 1),), (batch,))
        for device, batch in zip(devices, batches, strict=True)
    )
    return Case(name, scenario, Plan(name, name, "by hand", "1f1b", built, synchronisation=how))


# With --quick, every sixth case is run.
QUICK_EVERY = 6

# Limits of the errors of step times, of which a run has the median over its steps, and of their rank correlation.
MEDIAN_ERROR = 0.03
ERROR_OF_95 = 0.10
RANK_CORRELATION = 0.95
ERROR_OF_REAL = 0.10

# Policies whose decisions do not change the bytes of a step.
_UNMOVED = ("none", "depth")

REAL_SCHEDULES = ("1f1b", "zb-h1")


def measure_fidelity(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Run every case in both backends, and compare step times and bytes."""
    # The limits are for links that carry real TCP, which only the relay emulates.
    backend = TorchBackend("paced", emulator=choose_emulator("relay", tell), tell=tell)
    cases = fidelity_cases(tell)
    rows: list[Row] = []
    for case in cases[::QUICK_EVERY] if quick else cases:
        rows.append(_compare(case, backend))
        tell(f"{case.name}: {100 * float(rows[-1]['step_error']):+.1f} %")
    predicted = [predict_real_compute(schedule, tell, rounds=1 if quick else ROUNDS) for schedule in REAL_SCHEDULES]
    errors = np.abs([float(row["step_error"]) for row in rows])
    simulated, real = ([float(row[side]) for row in rows] for side in ("simulated_step_s", "real_step_s"))
    real_error = max(abs(float(row["step_error"])) for row in predicted)
    # A policy may move layers in different steps of the two backends; the other runs must send equally many bytes.
    unmoved = [row for row in rows if row["policy"] in _UNMOVED]
    byte_difference = max(abs(int(row["wan_byte_difference"])) for row in (*unmoved, *predicted))
    return BenchResult(
        [*rows, *predicted],
        [
            at_most("worst step error of real compute", real_error, ERROR_OF_REAL),
            at_most("median step error", float(np.median(errors)), MEDIAN_ERROR),
            at_most("95th percentile of the step error", float(np.quantile(errors, 0.95)), ERROR_OF_95),
            at_least("Kendall's rank correlation", float(kendalltau(simulated, real)[0]), RANK_CORRELATION),
            at_most("largest WAN byte difference where no layers move", byte_difference, 0),
        ],
    )


def _compare(case: Case, backend: TorchBackend) -> Row:
    simulated, real = (
        measure(each.run(case.scenario, case.plan, make_policy(case.policy, case.scenario), case.steps))
        for each in (Simulator(), backend)
    )
    return {
        "case": case.name,
        "ranks": len(case.plan.devices),
        "policy": case.policy,
        "simulated_step_s": simulated.step_s,
        "real_step_s": real.step_s,
        "step_error": simulated.step_s / real.step_s - 1,
        "throughput_error": simulated.samples_per_s / real.samples_per_s - 1,
        "wan_byte_difference": simulated.wan_bytes - real.wan_bytes,
    }
