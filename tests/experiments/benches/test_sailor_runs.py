import json
from pathlib import Path
from typing import Any

import pytest

from experiments.benches.sailor.measured_files import (
    SailorNetwork,
)
from experiments.benches.sailor.runs import MeasuredRun, read_sailor_run, read_sailor_runs
from planner.check import check_plan
from planner.cost.network import nominal_path
from planner.files.importers.sailor import read_sailor
from planner.plan.plan import Replica, Stage
from planner.scenario.profile import LayerProfile, ModelProfile
from planner.scenario.size_curve import SizeCurve
from traces.common.errors import InputError

GROUP = [[["GH-96", 4, "zone"]], 2]
RUN: dict[str, Any] = {
    "zone": "zone",
    "pipeline_list": [
        {"num_stages": 2, "layers_per_stage": [[0], [1, 2]], "tmp_per_stage": [[GROUP] * 2] * 2, "dp": [2, 2]}
    ],
    "mbs": 4,
    "gbs": 20,
    "real": 1.5,
    "max_mem": 7000,
    "N": 4,
}
# One GPU sends at 20 GB/s, two of a node at 30 GB/s together.
ALONE, TOGETHER = [[0.0, 0.0, 20.0], 20e9], [[0.0, 0.0, 30.0], 30e9]
NETWORK = {"zone": {"GH-96": {str(n): {"zone": {"GH-96": {str(n): c}}} for n, c in ((1, ALONE), (2, TOGETHER))}}}
MODEL = ModelProfile("toy", (LayerProfile("layer", 0, 0, 0, {}),) * 3)


@pytest.fixture
def network(tmp_path: Path) -> SailorNetwork:
    path = tmp_path / "network" / "network.json"
    path.parent.mkdir()
    path.write_text(json.dumps(NETWORK))
    return SailorNetwork(path)


def read(folder: Path, network: SailorNetwork, **changes: object) -> MeasuredRun:
    path = folder / "run.json"
    path.write_text(json.dumps({**RUN, **changes}))
    return read_sailor_run(path, MODEL, network)


def test_a_run_is_a_plan_and_what_was_measured(tmp_path: Path, network: SailorNetwork) -> None:
    run = read(tmp_path, network)
    (pipeline,) = run.plan.pipelines
    assert (run.name, run.step_s, run.peak_bytes) == ("run", 1.5, 7000)
    assert pipeline.microbatches == (8, 8, 8)
    assert pipeline.stages[1] == Stage(
        1,
        3,
        (
            Replica("pipeline-0-stage-1-replica-0-gpu-0", partners=("pipeline-0-stage-1-replica-0-gpu-1",)),
            Replica("pipeline-0-stage-1-replica-1-gpu-0", partners=("pipeline-0-stage-1-replica-1-gpu-1",)),
        ),
        in_flight=1,
    )
    assert pipeline.stages[0].in_flight == 2


def test_training_is_adam_with_the_batch_of_the_plan(tmp_path: Path, network: SailorNetwork) -> None:
    training = read(tmp_path, network).scenario.training
    assert (training.global_batch, training.microbatch, training.optimizer.name) == (24, 4, "adamw")


def test_one_gpu_of_a_group_sends_to_another_stage_and_all_sum_gradients(
    tmp_path: Path, network: SailorNetwork
) -> None:
    run = read(tmp_path, network)
    (link,) = run.scenario.cluster.path("pipeline-0-stage-1-replica-0-gpu-0", "pipeline-0-stage-1-replica-1-gpu-0")
    assert link.size_curve == SizeCurve(0.0, 0.0, 20.0, 8 * 20e9)
    assert link.bandwidth_bps == 8 * 30e9
    path = nominal_path(run.scenario, link.source + "-gpu-0", link.target + "-gpu-0")
    assert 8e9 / path.transmission_s(1e9) == pytest.approx(8 * 20e9)
    assert 8e9 / path.transmission_s(1e9, 2) == pytest.approx(8 * 30e9)


def test_several_pipelines_share_the_batch(tmp_path: Path, network: SailorNetwork) -> None:
    plan = read(tmp_path, network, pipeline_list=RUN["pipeline_list"] * 2, gbs=32).plan
    assert [pipeline.microbatches for pipeline in plan.pipelines] == [(8, 8), (8, 8)]
    assert len(set(plan.devices)) == len(plan.devices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"real": 0}, "run.json: real: Input should be greater than 0"),
        (
            {"pipeline_list": [{**RUN["pipeline_list"][0], "dp": [2, 1]}]},
            "run.json: pipeline_list[0]: 2 stages have [2, 2] replicas, but 'dp' is [2, 1]",
        ),
        (
            {"pipeline_list": [{**RUN["pipeline_list"][0], "tmp_per_stage": [[[[["GH-96", 1, "zone"]], 2]] * 2] * 2}]},
            "run.json: a tensor-parallel group of 2 GPUs is on [('GH-96', 1, 'zone')]",
        ),
        (
            {"pipeline_list": [{**RUN["pipeline_list"][0], "tmp_per_stage": [[[[["GH-95", 4, "zone"]], 2]] * 2] * 2}]},
            "run.json: unknown GPU kind 'GH-95'; did you mean 'GH-96'?",
        ),
    ],
)
def test_odd_runs_are_refused(tmp_path: Path, network: SailorNetwork, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, network, **changes)
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(message)


def test_a_folder_without_runs_is_refused(tmp_path: Path, network: SailorNetwork) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no measured runs"):
        read_sailor_runs(empty, MODEL, network)


def test_the_published_runs(shared_folder: Path) -> None:
    sailor = shared_folder / "profiles" / "sailor"
    model = read_sailor(sailor / "layer_times.json", sailor / "layer_sizes.json", "OPT-350")
    network = SailorNetwork(sailor / "providers" / "multizone_bandwidths_het.json")
    runs = read_sailor_runs(sailor / "measured-opt-350m-gh200", model, network)
    assert len(runs) == 15
    for run in runs:
        check_plan(run.plan, run.scenario)
