"""Layers that change devices while processes train: training as in one process, rows as in the simulator."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from planner.events.event import EventKind
from planner.plan.plan import Plan
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from sim.simulator import Simulator
from tests.helpers.processes.training import (
    CONVOLUTIONAL,
    GPT,
    assert_trained,
    hybrid_plan,
    train_in_one_process,
    training_scenario,
)
from tests.helpers.scenarios.builders import layered_plan, mesh_scenario
from tests.helpers.strategies.scripted_policy import Scripted
from tests.helpers.strategies.timeless_rows import rows

STEPS = 8


def placed(
    scenario: Scenario, stages: list[tuple[int, list[float]]], devices: list[int], microbatches: list[int]
) -> Plan:
    """A pipeline of (layers, shares of the replicas) per stage on these devices of the scenario, in this order."""
    names = scenario.cluster.devices
    chosen = replace(scenario, cluster=replace(scenario.cluster, devices=tuple(names[index] for index in devices)))
    return hybrid_plan(chosen, "1f1b", [(stages, microbatches)])


@pytest.mark.parametrize(
    ("code", "optimizer"),
    [
        pytest.param(CONVOLUTIONAL, Optimizer("adamw", learning_rate=0.001), id="adamw"),
        pytest.param(GPT, Optimizer("momentum", learning_rate=0.05), id="momentum", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_as_if_nothing_had_moved(code: ModelCode, optimizer: Optimizer, tmp_path: Path) -> None:
    scenario = training_scenario(code, 4, optimizer=optimizer)
    layers = len(scenario.model.layers)
    first = placed(scenario, [(2, [1.0]), (layers - 2, [1.0])], [0, 1], [4, 4, 4])
    wider = placed(scenario, [(1, [1.0]), (2, [2.0, 1.0]), (layers - 3, [1.0])], [1, 2, 3, 0], [6, 3, 3])
    fewer = placed(scenario, [(3, [1.0]), (layers - 3, [1.0])], [2, 0], [2] * 6)
    target = tmp_path / "parameters.safetensors"
    policy = Scripted({0: wider, 3: fewer})
    record = TorchBackend("real", parameters=target).run(scenario, first, policy, STEPS)
    assert [decision.first_step for decision in record.decisions] == [2, 5]
    expected = train_in_one_process(scenario, STEPS)
    assert record.losses == pytest.approx(expected.losses, rel=1e-6)
    trained = load_file(target)
    assert trained.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_both_backends_move_the_same() -> None:
    scenario = mesh_scenario(
        4,
        [0.002] * 5,
        [0.004] * 5,
        link=lambda a, b: (200e6, 0.004),
        parameter_bytes=[40000] * 5,
        regions=["a", "a", "b", "b"],
    )
    first = layered_plan(scenario, [([(2, 1, 2), (5, 2, 1)], [4, 4])])
    second = layered_plan(scenario, [([(1, 1, 3), (3, 1, 2), (5, 2, 1)], [2, 2, 2, 2])])
    second = replace(second, connections=2, compression="int8")
    real = TorchBackend("paced", emulator="shaper").run(scenario, first, Scripted({1: second, 4: first}), STEPS)
    simulated = Simulator().run(scenario, first, Scripted({1: second, 4: first}), STEPS)
    assert rows(real) == rows(simulated)
    assert any(event.kind is EventKind.MIGRATE for event in real.events)


def test_messages_change_their_format_without_moving_a_layer(tmp_path: Path) -> None:
    scenario = training_scenario(GPT, 2, regions=["a", "b"])
    plan = placed(scenario, [(2, [1.0]), (len(scenario.model.layers) - 2, [1.0])], [0, 1], [4, 4, 4])
    policy = Scripted({1: replace(plan, compression="int8"), 4: plan})
    record = TorchBackend("real", parameters=tmp_path / "parameters.safetensors").run(scenario, plan, policy, STEPS)
    assert [decision.migration.moves for decision in record.decisions] == [(), ()]
    sizes = [
        max(event.size_bytes for event in record.events if event.kind is EventKind.SEND and event.step == step)
        for step in range(STEPS)
    ]
    first, back = (decision.first_step for decision in record.decisions)
    plain, small = sizes[0], sizes[first]
    assert small < 0.3 * plain
    assert sizes == [small if first <= step < back else plain for step in range(STEPS)]
    expected = train_in_one_process(scenario, STEPS).losses
    assert record.losses[:first] == pytest.approx(expected[:first], rel=1e-6)
    assert record.losses == pytest.approx(expected, rel=1e-2)
    assert record.losses != pytest.approx(expected, rel=1e-6)


@pytest.mark.timeout(120)
def test_a_device_that_comes_back_begins_the_same_copies_as_the_others(tmp_path: Path) -> None:
    """One that only its sender begins would hold back its later messages to the same device, and so the run."""
    scenario = training_scenario(GPT, 4, regions=["a", "b", "c", "b"])
    # Copies of the last stage take longer than many steps.
    links = tuple(
        replace(link, bandwidth_bps=2e6 if link.name == "c->a" else 200e6, latency_s=0.001)
        for link in scenario.cluster.links
    )
    scenario = replace(scenario, cluster=replace(scenario.cluster, links=links))
    stages = [(2, [1.0]), (2, [1.0]), (len(scenario.model.layers) - 4, [1.0])]
    one, other = (placed(scenario, stages, devices, [4, 4, 4]) for devices in ([0, 1, 2], [0, 3, 2]))
    changes = {step: one if step % 6 else other for step in range(0, 4 * STEPS, 3)}
    backend = TorchBackend("real", emulator="shaper", parameters=tmp_path / "parameters.safetensors", backup_every=1)
    record = backend.run(scenario, one, Scripted(changes), 4 * STEPS)
    assert len(record.decisions) > 4
    assert_trained(record, tmp_path / "parameters.safetensors", train_in_one_process(scenario, 4 * STEPS))
