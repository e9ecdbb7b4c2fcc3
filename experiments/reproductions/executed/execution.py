"""Runs published systems and their rivals for real, and compares the ratios of throughputs with the simulator's.

In a real run a process for each device waits for the profiled time of each action and sends true bytes over emulated
links, with real TCP. The ratio of the system's throughput to each rival's is measured in both backends.

Scenarios with too many bytes for this machine, or with too long steps, are scaled. Dividing all bytes and all rates by
one number changes no time. Dividing all times and multiplying all rates by another number keeps the ratio of any two
times. Therefore the scaled scenario has the ratios of the original one, up to the rounding of bytes
(tests/experiments/reproductions/test_scaling.py), and any difference of a real run is due to this machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from executor.backend import TorchBackend
from experiments.benches.result import Check, Row, at_most
from experiments.reproductions.asteroid.settings import CLUSTERS, edge_scenario
from experiments.reproductions.cannikin.training import base_scenario
from experiments.reproductions.cloudless.settings import (
    PASCAL,
    RESNET_18,
    SMALL_CNN,
    VOLTA,
    rental_scenario,
    server_scenario,
)
from experiments.reproductions.deepcee.scenarios import deepcee_scenario
from planner.events.event import EventKind
from planner.plan.plan import Plan
from planner.runs.metrics import Metrics, measure, trained_samples
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Link
from planner.scenario.effects import WIDE_AREA_TCP, ComputeEffects, Effects, Slowdown
from planner.scenario.profile import LayerProfile, TimeTable
from planner.scenario.scenario import Scenario
from planner.systems.cloudless.strategy import with_exchanges
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator
from traces.trace import LinkTrace

# Bytes of a number; scaled sizes are whole numbers of them.
_NUMBER_BYTES = 4


def scaled(scenario: Scenario, smaller: float, quicker: float) -> Scenario:
    """Return the scenario with all bytes divided by ``smaller`` and all times divided by ``quicker``.

    Devices keep their memory, so that plans still fit.
    """
    bandwidth = quicker / smaller
    cluster = scenario.cluster
    devices = tuple(replace(each, interface_bps=each.interface_bps * bandwidth) for each in cluster.devices)
    links = tuple(_link(each, bandwidth, quicker) for each in cluster.links)
    layers = tuple(_layer(each, smaller, quicker) for each in scenario.model.layers)
    return replace(scenario, cluster=Cluster(devices, links), model=replace(scenario.model, layers=layers), faults=())


def _link(link: Link, bandwidth: float, quicker: float) -> Link:
    assert link.size_curve is None, "its sizes would have to be scaled too"
    trace = link.trace and _trace(link.trace, bandwidth, quicker)
    return replace(
        link,
        bandwidth_bps=link.bandwidth_bps * bandwidth,
        latency_s=link.latency_s / quicker,
        jitter_s=link.jitter_s / quicker,
        trace=trace,
    )


def _trace(trace: LinkTrace, bandwidth: float, quicker: float) -> LinkTrace:
    latency_s = trace.latency_s
    return replace(
        trace,
        times_s=trace.times_s / quicker,
        bandwidth_bps=trace.bandwidth_bps * bandwidth,
        duration_s=trace.duration_s / quicker,
        latency_s=None if latency_s is None else latency_s / quicker,
    )


def _layer(layer: LayerProfile, smaller: float, quicker: float) -> LayerProfile:
    def fewer(size_bytes: int) -> int:
        numbers = round(size_bytes / smaller / _NUMBER_BYTES)
        return _NUMBER_BYTES * max(numbers, int(size_bytes > 0))

    return replace(
        layer,
        parameter_bytes=fewer(layer.parameter_bytes),
        output_bytes=fewer(layer.output_bytes),
        activation_bytes=fewer(layer.activation_bytes),
        times={kind: _table(table, quicker) for kind, table in layer.times.items()},
        update_s={kind: seconds / quicker for kind, seconds in layer.update_s.items()},
    )


def _table(table: TimeTable, quicker: float) -> TimeTable:
    def less(times_s: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(each / quicker for each in times_s)

    return TimeTable(table.samples, less(table.forward_s), less(table.backward_input_s), less(table.backward_weight_s))


MOST_POINTS = 10.0

# Most traffic of all devices together that a machine with two cores can carry, bytes per second.
_CARRIED = 40e6

Contender = tuple[Plan, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of a system with its rivals in one setting.

    Attributes:
        contenders: Maps the name of each contender to its plan and its policy; the first contender is the system.
        steps: Number of training steps of each run, including a first one that is not counted.
        step_s: Step time of the quickest contender after scaling, seconds; None for no scaling. Short steps are
            lengthened, since this machine takes time for every message.
        per_dollar: Whether to compare samples per US dollar instead of samples per second.
    """

    setting: str
    scenario: Scenario
    contenders: Mapping[str, Contender]
    steps: int
    step_s: float | None = None
    per_dollar: bool = False


def execute(comparison: Comparison, tell: Callable[[str], None]) -> list[Row]:
    """Run all contenders in both backends; return a row for each rival."""
    scenario, scale = _reduced(comparison)
    simulated, executed = dict[str, float](), dict[str, float]()
    # By contender, bytes between regions in the simulator and in the real run.
    wan_bytes = dict[str, tuple[int, int]]()
    for name, (plan, policy) in comparison.contenders.items():
        expected = Simulator().run(scenario, plan, make_policy(policy, scenario), comparison.steps)
        tell(f"{comparison.setting}: {name}")
        backend = TorchBackend("paced", emulator="auto")
        record = backend.run(scenario, plan, make_policy(policy, scenario), comparison.steps)
        metrics = measure(expected), measure(record)
        simulated[name], executed[name] = (
            _rate(comparison, run, figures) for run, figures in zip((expected, record), metrics, strict=True)
        )
        wan_bytes[name] = metrics[0].wan_bytes, metrics[1].wan_bytes
    own, *rivals = comparison.contenders
    return [
        {
            "setting": f"{comparison.setting}; {scale}",
            "system": own,
            "rival": rival,
            "simulated_ratio": simulated[own] / simulated[rival],
            "executed_ratio": executed[own] / executed[rival],
            "points": 100 * (executed[own] / executed[rival] / (simulated[own] / simulated[rival]) - 1),
            **wan_ratios(wan_bytes[own], wan_bytes[rival]),
        }
        for rival in rivals
    ]


def wan_ratios(own: tuple[int, int], rival: tuple[int, int]) -> Row:
    """Return the ratios of the bytes between regions, simulated and executed; nothing without such bytes."""
    if not all((*own, *rival)):
        return {}
    simulated, executed = (mine / other for mine, other in zip(own, rival, strict=True))
    points = 100 * (executed / simulated - 1)
    return {"simulated_wan_ratio": simulated, "executed_wan_ratio": executed, "wan_points": points}


def executed_checks(rows: Sequence[Row]) -> list[Check]:
    """Return the checks of the largest differences of executed ratios from the simulated ones."""
    checks = []
    for name, column in (("ratio", "points"), ("ratio of bytes between regions", "wan_points")):
        differences = [abs(float(row[column])) for row in rows if column in row]
        if differences:
            title = f"executed {name} to simulated {name}, largest difference in percent"
            checks.append(at_most(title, max(differences), MOST_POINTS))
    return checks


def _rate(comparison: Comparison, record: RunRecord, metrics: Metrics) -> float:
    if comparison.per_dollar:
        return trained_samples(record) / metrics.cost_usd
    return metrics.samples_per_s


def _reduced(comparison: Comparison) -> tuple[Scenario, str]:
    """Return the scaled scenario with the effects of TCP, and a text that describes the scaling.

    Slow-downs stay; they last from the start of the run.
    """
    slow = ComputeEffects(slowdowns=comparison.scenario.effects.compute.slowdowns)
    scenario = replace(comparison.scenario, effects=Effects(network=WIDE_AREA_TCP, compute=slow))
    if comparison.step_s is None:
        return scenario, "at true size"
    steps = [_step(scenario, plan) for plan, _ in comparison.contenders.values()]
    quicker = min(step_s for step_s, _ in steps) / comparison.step_s
    smaller = max(1.0, max(size_bytes * quicker / step_s for step_s, size_bytes in steps) / _CARRIED)
    return scaled(scenario, smaller, quicker), f"{smaller:.3g} times fewer bytes, {quicker:.3g} times as quick"


def _step(scenario: Scenario, plan: Plan) -> tuple[float, int]:
    """Return the simulated time of a step, seconds, and the bytes that all devices send in it."""
    record = Simulator().run(scenario, plan, None, 2)
    sent = sum(event.size_bytes for event in record.events if event.kind is EventKind.SEND and event.step == 1)
    return measure(record).step_s, sent


STEPS = 4
ADAPTED_STEPS = 12
EXCHANGE_STEPS = 48

# Seconds of a step with hundreds of messages between eight devices, and of a step with few messages.
LONG_S, SHORT_S = 2.0, 0.5

# Number of steps if one contender takes tens of times as long as the other.
FEW_STEPS = 3

# The first setting of DeepCEE's reproduction, and a permanent drop of the rate of its links.
_CLUSTER, _MODEL, _WAN_BPS, _WAN_S = "data centres", "gpt-2.7b", 1e9, 0.01
_DROP_AT_S, _DROP_TO = 40.0, 0.3

# The network of Cannikin's ablations.
_NETWORK_BPS = 10e9


def deepcee_comparisons() -> list[Comparison]:
    """Return comparisons of pipelines across three data centres: with two orders of devices, with a link that drops."""
    comparisons = []
    for mixed in (False, True):
        scenario = deepcee_scenario(_CLUSTER, _MODEL, _WAN_BPS, _WAN_S, mixed=mixed)
        order = "devices in turn" if mixed else "region by region"
        rivals = ("deepcee", "megatron", "asteroid")
        comparisons.append(
            Comparison(f"{_CLUSTER}, {_MODEL}, {order}", scenario, _planned(scenario, rivals), STEPS, LONG_S)
        )
    drop = LinkTrace(np.array([0.0, _DROP_AT_S]), np.array([_WAN_BPS, _DROP_TO * _WAN_BPS]), 1e6)
    scenario = deepcee_scenario(_CLUSTER, _MODEL, _WAN_BPS, _WAN_S, trace=drop)
    plan = make_plan("deepcee", scenario)
    comparisons.append(
        Comparison(
            f"{_CLUSTER}, {_MODEL}, a link drops to {_DROP_TO:.0%}",
            scenario,
            _with_policies(plan, "deepcee", "none"),
            ADAPTED_STEPS,
            LONG_S,
        )
    )
    return comparisons


def asteroid_comparisons() -> list[Comparison]:
    """Return comparisons on Jetson boards on a LAN; ``ropebridge bench recovery`` measures recovery."""
    mobile, efficient = (edge_scenario(model, CLUSTERS["4 boards"], 32) for model in ("MobileNetV2", "EfficientNet-B1"))
    pipelines = _planned(mobile, ("asteroid", "gpipe", "pipedream", "dapple"))
    parallel = _planned(efficient, ("asteroid", "ddp"))
    return [
        Comparison("MobileNetV2, 4 boards, batch 32", mobile, pipelines, STEPS, LONG_S),
        Comparison("EfficientNet-B1, 4 boards, batch 32", efficient, parallel, FEW_STEPS, SHORT_S),
    ]


def cannikin_comparisons() -> list[Comparison]:
    """Return comparisons on three unlike GPUs, with shares by OptPerf from the start, and with learned shares."""
    scenario = base_scenario("A", "resnet50", _NETWORK_BPS)
    where = "resnet50, cluster A, 10 Gbit/s"
    planned = _planned(scenario, ("cannikin", "ddp", "lb-bsp"))
    learned = _with_policies(make_plan("ddp", scenario), "cannikin", "none")
    return [
        Comparison(where, scenario, planned, STEPS, SHORT_S),
        Comparison(f"{where}, shares learned", scenario, learned, ADAPTED_STEPS, SHORT_S),
    ]


def cloudless_comparisons() -> list[Comparison]:
    """Return comparisons of exchanging updates rarely or in every step, and of renting fewer GPUs."""
    small = server_scenario(SMALL_CNN, "cpu-core", 32)
    large = server_scenario(RESNET_18, "cpu-server", 128)
    comparisons = [
        Comparison(
            f"{name} samples a region", scenario, _exchanges(make_plan("greedy", scenario)), EXCHANGE_STEPS, step_s
        )
        for name, scenario, step_s in (("small-cnn, 32", small, None), ("resnet-18, 128", large, SHORT_S))
    ]
    rental = rental_scenario((PASCAL, VOLTA), 4, (2, 1))
    planned = _planned(rental, ("cloudless", "greedy"))
    comparisons.append(
        Comparison("4 P100 and 4 V100, data 2:1, samples per dollar", rental, planned, STEPS, LONG_S, per_dollar=True)
    )
    slowed = _slowed(rental, 0.5)
    steered = _with_policies(make_plan("cloudless", slowed), "cloudless", "none")
    where = "the same, P100 at half their speed, rented by the policy"
    comparisons.append(Comparison(where, slowed, steered, ADAPTED_STEPS, LONG_S, per_dollar=True))
    return comparisons


def _slowed(scenario: Scenario, speed: float) -> Scenario:
    """Return the scenario with the devices of the first region at a share of their profiled speed."""
    first = scenario.cluster.devices[0].region
    slow = tuple(Slowdown(each.name, (0.0,), (speed,)) for each in scenario.cluster.devices if each.region == first)
    compute = replace(scenario.effects.compute, slowdowns=slow)
    return replace(scenario, effects=replace(scenario.effects, compute=compute))


COMPARISONS: Mapping[str, Callable[[], Sequence[Comparison]]] = {
    "asteroid": asteroid_comparisons,
    "cannikin": cannikin_comparisons,
    "cloudless": cloudless_comparisons,
    "deepcee": deepcee_comparisons,
}


def _planned(scenario: Scenario, strategies: Sequence[str]) -> dict[str, Contender]:
    return {name: (make_plan(name, scenario), "none") for name in strategies}


def _with_policies(plan: Plan, *policies: str) -> dict[str, Contender]:
    return {f"policy {name}": (plan, name) for name in policies}


def _exchanges(plan: Plan) -> dict[str, Contender]:
    ways = {"asgd-ga, every 8": ("asgd-ga", 8), "ma, every 8": ("ma", 8), "asgd": ("asgd", 1)}
    return {name: (with_exchanges(plan, *way), "none") for name, way in ways.items()}
