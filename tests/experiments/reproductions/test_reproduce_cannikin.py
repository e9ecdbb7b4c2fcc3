"""Cannikin's reproduction: its models and clusters, its training, and the command."""

import json
from pathlib import Path

import pytest

from experiments.reproductions.architectures import MODELS
from experiments.reproductions.cannikin.training import (
    EPOCHS,
    MACHINES,
    NOISE_CURVES,
    SYSTEMS,
    LearnedModel,
    Setting,
    adaptive_even,
    adaptive_learned,
    base_scenario,
    cluster,
    fixed,
    with_batch,
)
from planner.check import check_plan
from planner.runs.metrics import measure
from planner.step.evaluate import step_time_s
from planner.systems.cannikin.goodput import goodput_per_s
from planner.systems.cannikin.strategy import adaptdl
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from tests.helpers.processes.command import ropebridge

NETWORK_BPS = 10e9


@pytest.mark.parametrize(
    ("model", "parameters", "multiply_adds"),
    # As counted of torchvision's and of common implementations; BERT-base without its pooler, with a head of 1,538.
    [("resnet18", 11_173_962, 0.556e9), ("resnet50", 25_557_032, 4.09e9), ("bert", 108_893_186, None)],
)
def test_layers_add_up_to_the_published_models(model: str, parameters: int, multiply_adds: float | None) -> None:
    layers = MODELS[model]().layers
    assert sum(layer.parameter_bytes for layer in layers) == 4 * parameters
    if multiply_adds is not None:
        assert sum(layer.forward_flop for layer in layers) == pytest.approx(2 * multiply_adds, rel=2e-3)


def test_clusters_are_those_of_the_paper() -> None:
    kinds = {name: [device.kind for device in cluster(name, NETWORK_BPS).devices] for name in MACHINES}
    assert kinds == {
        "A": ["a5000", "a4000", "p4000"],
        "B": ["a100-40"] * 4 + ["v100-16"] * 4 + ["rtx-6000"] * 8,
    }


@pytest.mark.parametrize("place", MACHINES)
@pytest.mark.parametrize("strategy", ["ddp", "adaptdl", "lb-bsp", "cannikin"])
def test_the_evaluator_and_the_simulator_agree_on_these_clusters(place: str, strategy: str) -> None:
    scenario = with_batch(base_scenario(place, "resnet50", NETWORK_BPS), 600)
    plan = make_plan(strategy, scenario)
    check_plan(plan, scenario)
    step_s = step_time_s(plan, scenario)
    record = Simulator().run(scenario, plan, None, 3)
    first_s = max(event.end_s for event in record.events if event.step == 0)
    assert first_s == pytest.approx(step_s, rel=1e-9)
    # Later steps begin when a device's own sums are done, a little before the last device's are.
    assert measure(record).step_s == pytest.approx(step_s, rel=0.01)


@pytest.mark.parametrize(
    ("model", "batch", "least", "most"), [("resnet50", 2048, 0.25, 0.30), ("bert", 256, 0.02, 0.14)]
)
def test_balance_alone_saves_more_where_compute_binds(model: str, batch: int, least: float, most: float) -> None:
    scenario = with_batch(base_scenario("B", model, NETWORK_BPS), batch)
    even_s, balanced_s = (step_time_s(make_plan(each, scenario), scenario) for each in ("adaptdl", "cannikin"))
    assert least <= 1 - balanced_s / even_s <= most


def test_what_is_learned_predicts_the_steps_it_was_learned_from() -> None:
    scenario = base_scenario("A", "resnet50", NETWORK_BPS)
    model = LearnedModel(scenario)
    batch = scenario.training.global_batch
    model.run(batch, even=True)
    model.run(batch)
    assert model.predicted_s(batch) == pytest.approx(model.run(batch), rel=0.03)
    assert model.predicted_s(4 * batch) == pytest.approx(model.simulated_s(4 * batch), rel=0.05)


def test_training_adds_up_what_each_part_takes() -> None:
    setting = Setting(base_scenario("A", "resnet18", NETWORK_BPS), "high", 6)
    first = setting.first_batch
    assert setting.candidates == (128, 256, 512, 1024, 2048, 4096)
    noise = [setting.noise_scale(epoch) for epoch in range(EPOCHS)]
    assert noise == sorted(noise)
    low, high = NOISE_CURVES["high"]
    assert low * first < noise[0] < noise[-1] < high * first

    ddp = fixed(setting, adaptdl)
    step_s = step_time_s(adaptdl(setting.scenario), setting.scenario)
    assert ddp.time_s == pytest.approx(step_s / first)

    adaptive = adaptive_even(setting)
    for epoch in (0, 50, 99):
        scenario = with_batch(setting.scenario, adaptive.batches[epoch])
        took_s = step_time_s(adaptdl(scenario), scenario)
        per_s = goodput_per_s(adaptive.batches[epoch], took_s, first, noise[epoch])
        assert adaptive.epochs_s[epoch] == pytest.approx(1 / per_s)
    assert adaptive.time_s <= ddp.time_s


def test_cannikin_learns_for_two_parts_and_is_then_the_fastest() -> None:
    setting = Setting(base_scenario("A", "resnet18", NETWORK_BPS), "high", 6)
    trained, _ = adaptive_learned(setting)
    others = {name: train(setting) for name, train in SYSTEMS.items()}
    assert trained.batches[:2] == (128, 128)
    assert trained.epochs_s[0] == pytest.approx(others["ddp"].epochs_s[0])
    assert trained.epochs_s[1] < trained.epochs_s[0]
    assert trained.time_s < min(each.time_s for each in others.values())


@pytest.mark.slow
def test_the_command_holds_the_claims_against_what_it_measures(tmp_path: Path) -> None:
    done = ropebridge("reproduce", "cannikin", "--quick", "--json", "-o", tmp_path / "out")
    document = json.loads(done.stdout)
    assert done.returncode == (0 if all(check["holds"] for check in document["checks"]) else 1), done.stderr
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "result.json").read_text())["rows"] == document["rows"]
    # Balance times an adaptive batch saves most of DDP's time; balance alone, half of AdaptDL's on the unlike cluster.
    claims = {row["claim"]: row for row in document["rows"]}
    assert claims["time to the target saved against ddp, percent, all settings"]["largest"] > 70
    assert claims["time to the target saved against adaptdl, percent, all settings"]["largest"] > 40
    *_, chosen, anywhere = document["rows"]
    assert chosen["largest"] < 10
    assert chosen["largest"] <= anywhere["largest"]
    assert {row["paper"] for row in document["rows"]} == {"up to 85 %", "up to 52 %", "below 5 %"}
    assert all("assumed" in row["setting"] for row in document["rows"])
    assert any("Assumed" in remark for remark in document["remarks"])
    assert len(document["ablations"]) == 3
