"""Layers cut over the devices of a host train as one process does, through real processes; what cannot be is refused.

A cut adds the parts of a sum in another order than one process. Measured over these cases the largest differences were
those noted at the tolerance.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import ropebridge
from safetensors.torch import load_file
from torch import nn
from training import CONVOLUTIONAL, GPT, Trained, train_in_one_process, training_scenario

from executor.backend import TorchBackend
from executor.model import check_model, load_with_sizes
from executor.support import check_supported
from executor.training.tensor_parallel import cut_layer, parts
from executor.training.tensor_parallel_layout import check_layouts
from planner.cluster import Cluster
from planner.files.plan_file import write_plan
from planner.files.scenario_json import write_resolved_scenario
from planner.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.profile import ModelProfile
from planner.scenario import ModelCode, Optimizer, Scenario
from traces.errors import InputError

STEPS = 4
TOLERANCE = 1e-6


def gpt_shard_bytes(scenario: Scenario, degree: int) -> list[int]:
    """By arithmetic: a block's four weights and the biases behind columns are cut, the rest is not."""
    assert scenario.code is not None
    width = scenario.code.arguments["width"]
    cut = 3 * width * width + 3 * width + width * width + 4 * width * width + 4 * width + 4 * width * width
    whole = 4 * width + 2 * width
    block = 4 * (cut // degree + whole)
    return [
        layer.parameter_bytes if index in (0, len(scenario.model.layers) - 1) else block
        for index, layer in enumerate(scenario.model.layers)
    ]


def on_one_host(code: ModelCode, devices: int, degrees: Collection[int] = (2,)) -> Scenario:
    scenario = training_scenario(code, devices)
    cluster = scenario.cluster
    placed = tuple(replace(device, host="host") for device in cluster.devices)

    def shard(degree: int) -> ModelProfile:
        sizes = gpt_shard_bytes(scenario, degree) if code is GPT else [0] * len(scenario.model.layers)
        layers = zip(scenario.model.layers, sizes, strict=True)
        return ModelProfile("shard", tuple(replace(layer, parameter_bytes=size) for layer, size in layers))

    model = replace(scenario.model, sharded={degree: shard(degree) for degree in degrees})
    return replace(scenario, cluster=Cluster(placed, cluster.links), model=model)


def grouped_plan(
    scenario: Scenario,
    stages: Sequence[tuple[int, Sequence[tuple[int, float]]]],
    microbatches: Sequence[int],
    *,
    schedule: str = "1f1b",
    recompute: Collection[int] = (),
) -> Plan:
    """One pipeline of (layers, (degree, share) of each replica) per stage; devices in order."""
    names = iter(device.name for device in scenario.cluster.devices)
    first, built = 0, []
    for index, (layers, replicas) in enumerate(stages):
        groups = [([next(names) for _ in range(degree)], share) for degree, share in replicas]
        made = tuple(Replica(group[0], share, tuple(group[1:])) for group, share in groups)
        built.append(Stage(first, first + layers, made, len(stages) - index, index in recompute))
        first += layers
    pipeline = Pipeline(tuple(built), tuple(microbatches))
    return Plan(scenario.name, scenario.model.name, "hand", schedule, (pipeline,))


def train(scenario: Scenario, plan: Plan, folder: Path) -> Trained:
    target = folder / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, None, STEPS)
    return Trained(list(record.losses), load_file(target))


def assert_equal(trained: Trained, expected: Trained, tolerance: float = TOLERANCE) -> None:
    assert trained.parameters.keys() == expected.parameters.keys()
    worst = max(float((value - expected.parameters[name]).abs().max()) for name, value in trained.parameters.items())
    print("WORST", worst, max(abs(a - b) for a, b in zip(trained.losses, expected.losses)))
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(torch.tensor(trained.losses), torch.tensor(expected.losses), **near)
    torch.testing.assert_close(dict(trained.parameters), dict(expected.parameters), **near)


PAIR = [(2, 1.0)]
PLANS = [
    pytest.param([(6, PAIR)], "1f1b", (), id="one-stage"),
    pytest.param([(2, PAIR), (4, PAIR)], "1f1b", (1,), id="two-stages-one-recomputing"),
    pytest.param([(3, PAIR), (3, PAIR)], "zb-h1", (0,), id="split-backward"),
    pytest.param([(6, [(2, 1.0), (2, 2.0)])], "gpipe", (), id="two-replicas"),
    pytest.param([(2, [(1, 1.0)]), (4, PAIR)], "1f1b", (), id="a-single-device-before-a-pair"),
]


@pytest.mark.parametrize(("stages", "schedule", "recompute"), PLANS)
def test_groups_train_as_one_process(
    stages: Sequence[tuple[int, Sequence[tuple[int, float]]]], schedule: str, recompute: Sequence[int], tmp_path: Path
) -> None:
    scenario = on_one_host(GPT, sum(degree for _, replicas in stages for degree, _ in replicas))
    plan = grouped_plan(scenario, stages, (5, 4, 3), schedule=schedule, recompute=recompute)
    assert_equal(train(scenario, plan, tmp_path), train_in_one_process(scenario, STEPS))


def test_clipping_counts_every_shard_and_the_order_may_be_found_as_it_goes(tmp_path: Path) -> None:
    scenario = on_one_host(GPT, 4)
    scenario = replace(scenario, training=replace(scenario.training, clip_norm=0.05))
    plan = grouped_plan(scenario, [(3, PAIR), (3, PAIR)], (3, 3, 3, 3), schedule="zb-h1")
    trained = train(scenario, replace(plan, order="dynamic"), tmp_path)
    assert_equal(trained, train_in_one_process(scenario, STEPS))


def test_adamw_on_shards(tmp_path: Path) -> None:
    scenario = on_one_host(GPT, 2)
    rule = Optimizer("adamw", 0.001, weight_decay=0.01)
    scenario = replace(scenario, training=replace(scenario.training, optimizer=rule))
    plan = grouped_plan(scenario, [(6, PAIR)], (6, 6))
    # As elsewhere: rounding in a gradient near zero moves a parameter by a share of the learning rate.
    assert_equal(train(scenario, plan, tmp_path), train_in_one_process(scenario, STEPS), tolerance=5e-6)
