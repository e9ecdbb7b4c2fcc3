import json
from pathlib import Path

import pytest

from experiments.reproductions.deepcee.scenarios import CLUSTERS, GPT_SIZES, MODELS, deepcee_scenario, model_profile
from tests.helpers.processes.command import ropebridge


@pytest.mark.slow
def test_the_quick_reproduction_through_the_command(tmp_path: Path) -> None:
    done = ropebridge("reproduce", "deepcee", "--quick", "--json", "-o", tmp_path / "out")
    # A claim that does not appear is a result, not a failure.
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {"rows", "ablations", "details", "checks", "remarks", "machine"} <= set(document)
    throughputs = [row for row in document["details"] if row["part"] == "throughput"]
    assert len(throughputs) == 2
    assert all(row["deepcee"] / row["ratio_to_best"] == pytest.approx(row[row["best_rival"]]) for row in throughputs)
    verdicts = {row["claim"]: row["verdict"] for row in document["rows"]}
    assert verdicts["tf32: throughput to the best rival"] in ("appears", "does not appear")
    assert (tmp_path / "out" / "figure.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt-1.3b", 1.3), ("gpt-2.7b", 2.7), ("gpt-6.7b", 6.7), ("vit-huge", 0.63)]
)
def test_models_have_the_parameters_of_their_names(name: str, billions: float) -> None:
    model = model_profile(name, ["a100-40"])
    # The head has a matrix of its own, which the names do not count.
    parameters = (model.parameter_bytes(0, len(model.layers)) - model.layers[-1].parameter_bytes) / 4
    assert parameters / 1e9 == pytest.approx(billions, rel=0.05)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_clusters_name_their_devices_region_by_region_or_in_turn(cluster: str) -> None:
    plain = deepcee_scenario(cluster, MODELS[-1], 1e9, 0.01).cluster.devices
    mixed = deepcee_scenario(cluster, MODELS[-1], 1e9, 0.01, mixed=True).cluster.devices
    assert {device.name for device in plain} == {device.name for device in mixed}
    assert [device.region for device in mixed[:3]] == ["cloud", "edge", "end"]
    assert list(GPT_SIZES) == ["gpt-1.3b", "gpt-2.7b", "gpt-6.7b"]
