"""Steps with the dynamic order on shared links: the evaluator chooses as the simulator's devices do, by other code."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.benches.planning.random_clusters import random_cluster
from planner.check import is_possible
from planner.cost.memory import needed_bytes
from planner.plan.plan import ALGORITHMS, Pipeline, Plan, Replica, Stage, Synchronisation
from planner.runs.metrics import measure
from planner.scenario.effects import ComputeEffects, Effects
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import Scenario
from planner.step.shared_links.step_time import shared_step_time_s, steady_step_time_s
from sim.simulator import Simulator

# With more, rounding errors of the rates of flows grow until they decide which of two actions is chosen.
MOST_MICROBATCHES = 24


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
def test_actors_choose_as_in_the_simulator(seed: int, blocks: bool, tight: bool) -> None:
    random = np.random.default_rng(seed)
    scenario = with_unlike_layers(random_cluster(int(random.integers(10**6))), random)
    assume(len(scenario.cluster.devices) <= 12)
    scenario = replace(scenario, effects=Effects(compute=ComputeEffects(transfers_block=blocks)))
    plan = drawn_plan(scenario, random)
    scenario = with_little_memory(scenario, plan, random) if tight else scenario
    assume(is_possible(plan, scenario))
    first, several = (measure(Simulator().run(scenario, plan, None, steps)).step_s for steps in (1, 3))
    assert shared_step_time_s(plan, scenario) == pytest.approx(first, rel=1e-4)
    assert steady_step_time_s(plan, scenario) == pytest.approx(several, rel=1e-4)


def with_unlike_layers(scenario: Scenario, random: np.random.Generator) -> Scenario:
    """Change the times of each layer a little, so that no input arrives at the very moment at which an actor is free.

    Rounding errors would decide whether it is there.
    """

    def changed(table: TimeTable) -> TimeTable:
        columns = ("forward_s", "backward_input_s", "backward_weight_s")
        factor = {name: random.uniform(0.9, 1.1) for name in columns}
        times = {name: tuple(factor[name] * each for each in getattr(table, name)) for name in columns}
        return replace(table, **times)

    layers = tuple(
        replace(layer, times={kind: changed(table) for kind, table in layer.times.items()})
        for layer in scenario.model.layers
    )
    return replace(scenario, model=replace(scenario.model, layers=layers))


def drawn_plan(scenario: Scenario, random: np.random.Generator) -> Plan:
    """Draw a plan of up to three pipelines, whose devices may have two stages each and take unequal shares."""
    names = [device.name for device in scenario.cluster.devices]
    random.shuffle(names)
    batch = scenario.training.global_batch
    parts = divided(names, int(random.integers(1, 1 + min(3, len(names), batch))), random)
    samples = [batch // len(parts) + (index < batch % len(parts)) for index in range(len(parts))]
    pipelines = tuple(drawn_pipeline(scenario, *each, random) for each in zip(parts, samples, strict=True))
    schedule, algorithm = (str(random.choice(each)) for each in (("1f1b", "compact-zb"), ALGORITHMS))
    how = Synchronisation(algorithm=algorithm)
    return Plan(scenario.name, scenario.model.name, "drawn", schedule, pipelines, "dynamic", how)


def drawn_pipeline(scenario: Scenario, names: Sequence[str], samples: int, random: np.random.Generator) -> Pipeline:
    layers = len(scenario.model.layers)
    groups = divided(names, int(random.integers(1, 1 + min(4, len(names), layers))), random)
    replicas = [tuple(Replica(name, float(random.choice([0.3, 1.0, 3.0]))) for name in group) for group in groups]
    if random.random() < 0.4 and 2 * len(groups) <= layers:
        replicas += replicas[::-1] if random.random() < 0.5 else replicas
    cuts = [part[0] for part in divided(range(layers), len(replicas), random)] + [layers]
    count = int(random.integers(1, 1 + min(samples, MOST_MICROBATCHES)))
    microbatches = tuple(len(part) for part in divided(range(samples), count, random))
    stages = tuple(
        Stage(first, end, own, int(random.integers(1, 1 + min(count, 8))), bool(random.random() < 0.3))
        for first, end, own in zip(cuts, cuts[1:], replicas, strict=False)
    )
    return Pipeline(stages, microbatches)


def divided(entries: Sequence, count: int, random: np.random.Generator) -> list:
    """Return ``count`` non-empty parts of a sequence, in order."""
    cuts = sorted(random.choice(np.arange(1, len(entries)), count - 1, replace=False).tolist()) if count > 1 else []
    return [entries[first:end] for first, end in zip([0, *cuts], [*cuts, len(entries)], strict=True)]


def with_little_memory(scenario: Scenario, plan: Plan, random: np.random.Generator) -> Scenario:
    """Return the scenario with memory for little more than one microbatch of each stage of a device."""
    needed = dict.fromkeys(plan.devices, 0.0)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for replica, samples in zip(stage.replicas, stage.most_samples(pipeline.microbatches), strict=True):
                needed[replica.device] += needed_bytes(scenario, stage, samples, 1)
    devices = tuple(
        replace(each, memory_bytes=int(needed[each.name] * random.choice([1.0, 1.05, 1.3])) + 1)
        if each.name in needed
        else each
        for each in scenario.cluster.devices
    )
    return replace(scenario, cluster=replace(scenario.cluster, devices=devices))
