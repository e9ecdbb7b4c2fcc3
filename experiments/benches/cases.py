"""Scenarios and plans that several benches share: two stages, a recovery, and a thousand devices on changing links."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer, Training
from traces.trace import LinkTrace

# Environment variable that names the folder of recorded traces, which are not part of the project.
TRACES_VARIABLE = "ROPEBRIDGE_TRACES"

TWO_DEVICES = ("west", "east")


def played(trace: LinkTrace, mean_bps: float, speed: float = 1) -> LinkTrace:
    """Return the trace scaled to a mean rate of ``mean_bps`` and played ``speed`` times as fast, without latencies."""
    rates_bps = trace.bandwidth_bps * (mean_bps / trace.mean_bps)
    return LinkTrace(trace.times_s / speed, rates_bps, trace.duration_s / speed)


def draw_seeds(what: str, count: int, seed: int | None, tell: Callable[[str], None]) -> range:
    """Return the seeds of ``count`` random cases from ``seed`` on, or from a random one; ``tell`` gets how to repeat.

    ``what`` names the cases, such as ``clusters``.
    """
    first = secrets.randbelow(10**6) if seed is None else seed
    seeds = range(first, first + count)
    tell(f"seeds {seeds[0]} to {seeds[-1]}; the same {what} with --seed {first}")
    return seeds


def two_stage_scenario(
    action_s: float, transfer_bytes: int, microbatches: int, bandwidth_bps: float, latency_s: float
) -> Scenario:
    """Return a scenario in which forward, input gradient and weight gradient of a microbatch take equally long.

    Args:
        action_s: Duration of each of these three actions on either device, seconds.
        transfer_bytes: Size of an activation, and of its gradient.
        microbatches: Number of microbatches, each of one sample.
        bandwidth_bps: Rate of the link each way, bits per second.
        latency_s: One-way latency of the link, seconds.
    """
    table = TimeTable((1,), (action_s,), (action_s,), (action_s,))
    layers = tuple(
        LayerProfile(f"layer-{n}", 4, transfer_bytes, transfer_bytes, dict.fromkeys(TWO_DEVICES, table))
        for n in range(2)
    )
    return Scenario(
        "two-stages",
        _cluster(bandwidth_bps, latency_s),
        ModelProfile("two-layers", layers),
        Training(microbatches, microbatch=1),
    )


def trained_scenario(model: ModelProfile, code: ModelCode, samples: int, rule: Optimizer) -> Scenario:
    """Return a scenario that trains a model on two devices, with ``samples`` samples a step and an optimizer."""
    return Scenario("two-stages", _cluster(1e9, 0.0), model, Training(samples, optimizer=rule), code)


def two_stage_plan(
    scenario: Scenario,
    schedule: str,
    microbatches: tuple[int, ...],
    in_flight: tuple[int, int],
    order: str,
    devices: Sequence[str] = TWO_DEVICES,
) -> Plan:
    """Return a plan of one pipeline with two stages, each of half of the model's layers."""
    layers = len(scenario.model.layers)
    middle = (layers + 1) // 2
    bounds = ((0, middle), (middle, layers))
    stages = tuple(
        Stage(*layers, (Replica(device),), depth)
        for layers, device, depth in zip(bounds, devices, in_flight, strict=True)
    )
    return Plan(scenario.name, scenario.model.name, "by hand", schedule, (Pipeline(stages, microbatches),), order=order)


def workers_plan(scenario: Scenario, devices: Sequence[str], samples: int, how: Synchronisation) -> Plan:
    """Return the plan of a worker on each device, which has all layers and ``samples`` samples of a step."""
    layers = len(scenario.model.layers)
    pipelines = tuple(Pipeline((Stage(0, layers, (Replica(device),), 1),), (samples,)) for device in devices)
    return Plan(scenario.name, scenario.model.name, "by hand", "1f1b", pipelines, synchronisation=how)


def _cluster(bandwidth_bps: float, latency_s: float) -> Cluster:
    devices = tuple(Device(name, name, f"region-{name}", 2**36) for name in TWO_DEVICES)
    west, east = (device.region for device in devices)
    links = (Link(west, east, bandwidth_bps, latency_s), Link(east, west, bandwidth_bps, latency_s))
    return Cluster(devices, links)


# Maps each device of the recovery plan to the part of the pipeline that the device holds.
KINDS = {
    "first": "the first stage",
    "middle": "a middle stage",
    "replica-0": "a replica",
    "replica-1": "a replica",
    "last": "the last stage",
}

MODEL = {"vocabulary": 64, "width": 64, "heads": 4, "blocks": 6, "length": 32}
_MODEL_FILE = Path(__file__).parents[1] / "models" / "gpt.py"
GLOBAL_BATCH = 16
MICROBATCHES = 4
LEARNING_RATE = 0.05

_LAYERS = MODEL["blocks"] + 2
_STAGES = ((0, 2, ("first",)), (2, 4, ("middle",)), (4, 6, ("replica-0", "replica-1")), (6, _LAYERS, ("last",)))

STAGES = len(_STAGES)


def recovery_case() -> tuple[Scenario, Plan]:
    """Return a scenario of five devices in one region, and a plan of four stages, the third with two replicas."""
    from executor.training.models.loading import load_with_sizes

    code = ModelCode(_MODEL_FILE, MODEL)
    sizes = load_with_sizes(code, seed=0).sizes
    # The policy plans with these times after a device has left; all devices are equally fast.
    table = TimeTable((1,), (0.002,), (0.002,), (0.002,))
    layers = tuple(
        LayerProfile(f"layer-{index}", size.parameter_bytes, size.output.size_bytes, 1000, {"cpu": table})
        for index, size in enumerate(sizes)
    )
    cluster = Cluster(tuple(Device(name, "cpu", "here", 2**32) for name in KINDS), (Link("here", "here", 1e9, 0.0),))
    training = Training(GLOBAL_BATCH, optimizer=Optimizer("momentum", learning_rate=LEARNING_RATE, momentum=0.9))
    scenario = Scenario("recovery", cluster, ModelProfile("gpt", layers), training, code)
    stages = tuple(
        Stage(first, end, tuple(Replica(name) for name in names), len(_STAGES) - index)
        for index, (first, end, names) in enumerate(_STAGES)
    )
    pipeline = Pipeline(stages, (GLOBAL_BATCH // MICROBATCHES,) * MICROBATCHES)
    return scenario, Plan(scenario.name, scenario.model.name, "asteroid", "1f1b", (pipeline,))


REGIONS = 16
DEVICES = 1024
LAYERS = 32
TRACE_S = 3600

# Sizes and times of a transformer layer of width 4096 at 2048 tokens a sample in fp32, on two kinds of device.
PARAMETER_BYTES = 12 * 4096**2 * 4
OUTPUT_BYTES = 2048 * 4096 * 4
FORWARD_S = {"fast": 0.08, "slow": 0.11}


def wide_area_scenario(
    seed: int = 0, *, devices: int = DEVICES, regions: int = REGIONS, global_batch: int = 1024
) -> Scenario:
    """Return a scenario of many devices and regions, whose devices are listed so that uniform pipelines cross regions.

    Links between two regions carry 2 to 10 Gbit/s, which vary by a quarter from second to second, with a one-way
    latency of 5 to 60 ms; the network inside a region carries 400 Gbit/s in total.
    """
    random = np.random.default_rng(seed)
    gpus = tuple(
        Device(f"gpu-{index}", "fast" if index % 3 else "slow", f"region-{index % regions}", 80 * 2**30, 2.0)
        for index in range(devices)
    )
    links = []
    for a in range(regions):
        for b in range(regions):
            if a == b:
                links.append(Link(f"region-{a}", f"region-{a}", 400e9, 50e-6))
                continue
            mean_bps, latency_s = random.uniform(2e9, 10e9), random.uniform(0.005, 0.06)
            rates = mean_bps * np.exp(0.25 * random.standard_normal(TRACE_S))
            trace = LinkTrace(np.arange(TRACE_S, dtype=np.float64), rates, float(TRACE_S))
            links.append(Link(f"region-{a}", f"region-{b}", trace.mean_bps, latency_s, trace, price_per_gb=0.02))
    times = {kind: TimeTable((1,), (each,), (each,), (each,)) for kind, each in FORWARD_S.items()}
    layers = tuple(
        LayerProfile(f"layer-{index}", PARAMETER_BYTES, OUTPUT_BYTES, 20 * OUTPUT_BYTES, times)
        for index in range(LAYERS)
    )
    training = Training(global_batch, microbatch=1, optimizer=Optimizer("adamw"))
    return Scenario("wide-area", Cluster(gpus, tuple(links)), ModelProfile("transformer", layers), training)
