import json
from pathlib import Path

import pytest

from experiments.reproductions.architectures import bert_small, efficientnet_b1, mobilenet_v2, resnet_50
from experiments.reproductions.asteroid.settings import CLUSTERS, edge_models, edge_scenario
from experiments.reproductions.asteroid.throughput import closed_form_errors
from planner.scenario.roofline import LayerWork
from planner.systems.asteroid.round_latency import round_latency_s, round_steps
from planner.systems.registry import make_plan
from tests.helpers.processes.command import ropebridge


@pytest.mark.parametrize(
    ("layers", "parameters", "multiplications"),
    [
        # As torchvision counts them; EfficientNet-B1 at 240 pixels.
        (mobilenet_v2(224, 1000), 3_504_872, 0.301e9),
        (efficientnet_b1(240, 1000), 7_794_184, 0.687e9),
        (resnet_50(224, 1000), 25_557_032, 4.089e9),
    ],
    ids=["MobileNetV2", "EfficientNet-B1", "ResNet-50"],
)
def test_vision_models_have_the_published_sizes(
    layers: tuple[LayerWork, ...], parameters: int, multiplications: float
) -> None:
    assert sum(layer.parameter_bytes for layer in layers) == 4 * parameters
    assert sum(layer.forward_flop for layer in layers) == pytest.approx(2 * multiplications, rel=0.002)


def test_bert_small_has_the_published_number_of_parameters() -> None:
    layers = bert_small(128, 2)
    # 28.8 million, and a classifier of two classes.
    assert sum(layer.parameter_bytes for layer in layers) / 4 == pytest.approx(28.8e6, rel=0.002)
    assert len(layers) == 1 + 2 * 4 + 1


def test_every_board_has_an_interface_of_the_lans_rate() -> None:
    scenario = edge_scenario("MobileNetV2", CLUSTERS["4 boards"], 32)
    path = scenario.cluster.path("xavier-nx-0", "nano-3")
    assert sorted(link.bandwidth_bps for link in path)[:2] == [100e6, 100e6]
    assert set(edge_models()) == {"EfficientNet-B1", "MobileNetV2", "ResNet-50", "BERT-small"}


def test_the_closed_form_of_a_plan_is_what_its_planner_counted_on() -> None:
    scenario = edge_scenario("MobileNetV2", CLUSTERS["4 boards"], 32)
    rounds_s = {}
    for name in ("asteroid", "dapple", "pipedream"):
        (pipeline,) = make_plan(name, scenario).pipelines
        rounds_s[name] = round_latency_s(round_steps(pipeline, scenario), len(pipeline.microbatches))
    assert rounds_s["asteroid"] <= min(rounds_s.values()) + 1e-12


def test_the_corrected_form_is_never_longer_than_exact_on_links_of_their_own() -> None:
    errors = closed_form_errors(60)
    assert max(errors.corrected) < 1e-9
    assert max(errors.published) > 0.01
    assert min(errors.plain_depth_ratios) > 1 - 1e-9


@pytest.mark.slow
def test_the_command_says_in_how_many_settings_the_claims_appear(tmp_path: Path) -> None:
    folder = tmp_path / "asteroid"
    done = ropebridge("reproduce", "asteroid", "--quick", "--json", "-o", folder)
    result = json.loads(done.stdout)
    # A claim that does not appear is a result, not a failure.
    assert done.returncode == 0, done.stderr
    assert all(check["holds"] for check in result["checks"])
    throughputs = [row for row in result["details"] if row["part"] == "throughput"]
    assert {"asteroid", "ddp", "gpipe", "pipedream", "dapple", "hetpipe", "deepcee"} <= set(throughputs[0])
    for row in result["rows"]:
        counted = {0: "does not appear", row["settings"]: "appears"}
        some = f"appears in {row['appears']} of {row['settings']} settings"
        assert row["verdict"] == (counted.get(row["appears"], some) if row["settings"] else "no setting")
    losses = [row for row in result["details"] if row["part"] == "recovery" and not row["note"]]
    assert losses
    for row in losses:
        # Detection and repeated rounds are charged to both methods.
        assert row["replay_total_s"] >= 1 + row["replay_planning_s"] + row["replay_migration_s"]
        assert row["heavy_total_s"] >= 1 + row["heavy_planning_s"] + row["heavy_migration_s"]
    assert all(len(row) == len(result["details"][0]) for row in result["details"])
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
