"""What DeepCEE is held against, and what each baseline makes of a setting."""

from dataclasses import dataclass

from planner.adapt.policy import Policy
from planner.cost.in_flight import plain_depths
from planner.plan.microbatches import even_cut, even_microbatches
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.metrics import measure
from planner.scenario.scenario import Scenario
from planner.systems.registry import STRATEGIES, make_plan
from sim.simulator import Simulator
from traces.common.errors import InputError

DATA_PARALLEL = "ddp"
SLOW_TO_PLAN = "asteroid"
BASELINES = ("megatron", DATA_PARALLEL, SLOW_TO_PLAN, "zb-h1-equal")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a baseline reaches.

    Attributes:
        samples_per_s: Simulated throughput; 0 where it does not run.
        note: How it runs, or why it does not.
    """

    samples_per_s: float
    note: str


def throughput(scenario: Scenario, plan: Plan, steps: int, policy: Policy | None = None) -> float:
    """Return a plan's simulated samples per second."""
    return measure(Simulator().run(scenario, plan, policy, steps)).samples_per_s


def baseline_outcome(name: str, scenario: Scenario, steps: int) -> Outcome:
    """Return what a baseline reaches; where data parallelism does not fit, a pipeline in each region."""
    if name not in STRATEGIES:
        return Outcome(0.0, "not there")
    try:
        return Outcome(throughput(scenario, make_plan(name, scenario), steps), "runs")
    except InputError:
        if name != DATA_PARALLEL:
            return Outcome(0.0, "does not fit into memory")
    try:
        return Outcome(throughput(scenario, regional_pipelines(scenario), steps), "a uniform pipeline in each region")
    except InputError:
        return Outcome(0.0, "does not fit into memory, nor does a pipeline in each region")


def regional_pipelines(scenario: Scenario) -> Plan:
    """Return data parallelism over regions, each a uniform 1F1B pipeline, with even parts of the batch."""
    cluster, layers = scenario.cluster, len(scenario.model.layers)
    parts = even_cut(scenario.training.global_batch, len(cluster.regions))
    pipelines = []
    for region, samples in zip(cluster.regions, parts, strict=True):
        devices = [device.name for device in cluster.devices if device.region == region]
        count = len(devices)
        stages = tuple(
            Stage(layers * index // count, layers * (index + 1) // count, (Replica(devices[index]),), depth)
            for index, depth in enumerate(plain_depths(count))
        )
        pipelines.append(Pipeline(stages, even_microbatches(scenario, samples, count)))
    return Plan(scenario.name, scenario.model.name, "regional pipelines", "1f1b", tuple(pipelines))
