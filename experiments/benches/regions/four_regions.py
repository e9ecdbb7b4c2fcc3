"""Four regions of a device each, links of a varying rate, the model that they train, and plans to compare with."""

from dataclasses import replace

import numpy as np

from experiments.benches.cases import workers_plan
from experiments.benches.regions.separate_training import MODEL_FILE
from experiments.benches.simulation.predicted import measured_profile, profile_of
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan, Synchronisation
from planner.runs.metrics import measure
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer, Training
from planner.systems.registry import STRATEGIES, make_plan
from sim.simulator import Simulator
from traces.common.errors import InputError
from traces.generators import ornstein_uhlenbeck
from traces.trace import LinkTrace

_ARGUMENTS = {"width": 128, "heads": 4, "blocks": 5, "length": 64}
REGIONS = ("asia", "europe", "north", "south")
_SAMPLES = 8
_KIND = "this-machine"

# The links: one-way latency in seconds; rates in bits per second, their variation and how long they stay alike.
LATENCY_S = 0.05
LEAST_BPS, MOST_BPS, _MEAN_BPS = 20e6, 200e6, 80e6
_VARIATION, _CORRELATION_S, _TRACE_S = 0.6, 10.0, 600.0

HAND_SET = Synchronisation("diloco", interval_steps=500)
# Equal settings for ropebridge's and torchft's streaming: torchft needs an interval that the fragments divide.
STREAMING = Synchronisation(
    "diloco-streaming", interval_steps=50, outer=OuterStep(fragments=2, pattern="strided", overlap_steps=5, mixing=0.5)
)


def regions_scenario(seed: int) -> Scenario:
    """Return the scenario of four regions, whose links differ by ``seed`` and direction; layers have no times yet."""
    code = ModelCode(MODEL_FILE, _ARGUMENTS)
    unused = TimeTable((_SAMPLES,), (1.0,), (1.0,), (1.0,))
    devices = tuple(Device(f"gpu-{region}", _KIND, region, 2**33) for region in REGIONS)
    links = []
    for number, (one, other) in enumerate((a, b) for a in REGIONS for b in REGIONS if a != b):
        trace = _trace(1000 * seed + number)
        links.append(Link(one, other, trace.mean_bps, LATENCY_S, trace))
    training = Training(_SAMPLES * len(REGIONS), optimizer=Optimizer("adamw", 0.002), seed=seed)
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
    return replace(scenario, model=measured_profile(scenario, plan_by_hand(scenario, Synchronisation())))


def plan_by_hand(scenario: Scenario, how: Synchronisation) -> Plan:
    """Return the plan of a worker in each region, each with equally many samples."""
    return workers_plan(scenario, [device.name for device in scenario.cluster.devices], _SAMPLES, how)


def best_pipeline(scenario: Scenario) -> Plan:
    """Return the plan with the shortest simulated step among the strategies' pipelines across regions."""
    found: list[tuple[float, Plan]] = []
    for name in STRATEGIES:
        try:
            plan = make_plan(name, scenario)
        except InputError:
            continue
        if len(plan.pipelines) == 1 and len(plan.pipelines[0].stages) > 1:
            found.append((measure(Simulator().run(scenario, plan, None, 10)).step_s, plan))
    return min(found, key=lambda each: each[0])[1]
