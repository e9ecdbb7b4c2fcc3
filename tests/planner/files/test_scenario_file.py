from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.files.scenario import read_scenario, scenario_schema
from planner.scenario.cluster import Link
from planner.scenario.profile import TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import LearningRateSchedule, Optimizer, Training
from planner.systems.registry import make_plan
from traces.common.errors import InputError
from traces.trace import LinkTrace

GOOD = """\
name: three-places
cluster:
  kinds:
    board: {peak: 2 TFLOP/s, memory: 8 GiB, memory_bandwidth: 50 GB/s}
  devices:
    - {name: big, kind: a100-40, region: cloud, price_usd_per_hour: 3.5}
    - {name: twin, kind: a100-40, region: cloud, memory: 20 GB}
    - {name: small, kind: board, region: edge}
  links:
    - {inside: cloud, bandwidth: 10 Gbit/s, latency: 50 us}
    - {between: [cloud, edge], bandwidth: 100 Mbit/s, latency: 20 ms, price_usd_per_gb: 0.09}
    - {from: twin, to: big, bandwidth: 1 GB/s, latency: 1 us}
    - from: edge
      to: edge
      latency: 1 ms
      trace:
        steps: [{at: 0 s, bandwidth: 8 Mbit/s}, {at: 1 min, bandwidth: 2 Mbit/s}]
        duration: 2 min
        mean: 10 Mbit/s
model:
  name: little
  layers:
    - name: embed
      parameters: 4 MB
      output: 2 KiB
      activation: 3 kB
      times:
        a100-40: {samples: [1, 4], forward: [1 ms, 2 ms], backward_input: [0 ms, 0 ms], backward_weight: [1 ms, 2 ms]}
        board: {samples: [1], forward: [9 ms], backward_input: [0 s], backward_weight: [12 ms]}
    - {name: block, repeat: 2, parameters: 1 MB, output: 2 KiB, activation: 5 kB, forward: 3 GFLOP}
  code: model.py
  arguments: {width: 64, deep: true, scale: 0.5, flavour: mild}
training:
  global_batch: 32
  microbatch: 4
  optimizer: {name: adamw, learning_rate: 0.001, weight_decay: 0.1}
  seed: 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the good scenario and its model's code."""
    (tmp_path / "model.py").write_text("def build(): ...\n")
    (tmp_path / "scenario.yaml").write_text(GOOD)
    return tmp_path


def test_a_good_scenario_is_read_whole(folder: Path) -> None:
    scenario = read_scenario(folder / "scenario.yaml")
    assert scenario.name == "three-places"
    devices = [(d.name, d.kind, d.region, d.memory_bytes, d.price_per_hour) for d in scenario.cluster.devices]
    assert devices == [
        ("big", "a100-40", "cloud", 40 * 2**30, 3.5),
        ("twin", "a100-40", "cloud", 20 * 10**9, 0.0),
        ("small", "board", "edge", 8 * 2**30, 0.0),
    ]
    assert scenario.cluster.links[:4] == (
        Link("cloud", "cloud", 1e10, pytest.approx(5e-5)),
        Link("cloud", "edge", 1e8, 0.02, None, 0.09),
        Link("edge", "cloud", 1e8, 0.02, None, 0.09),
        Link("twin", "big", 8e9, pytest.approx(1e-6)),
    )
    swaying = scenario.cluster.links[4]
    assert (swaying.name, swaying.latency_s, swaying.bandwidth_bps) == ("edge->edge", 0.001, pytest.approx(1e7))
    assert swaying.trace == LinkTrace(np.array([0.0, 60.0]), np.array([16e6, 4e6]), 120.0)
    assert scenario.training == Training(32, 4, Optimizer("adamw", 0.001, 0.9, 0.1), "fp32", 7)
    assert scenario.code == ModelCode(
        (folder / "model.py").resolve(), {"width": 64, "deep": True, "scale": 0.5, "flavour": "mild"}
    )


def test_layers_have_the_times_and_bytes_of_the_file(folder: Path) -> None:
    model = read_scenario(folder / "scenario.yaml").model
    assert [layer.name for layer in model.layers] == ["embed", "block-0", "block-1"]
    embed, block = model.layers[:2]
    assert (embed.parameter_bytes, embed.output_bytes, embed.activation_bytes) == (4_000_000, 2048, 3000)
    assert embed.times == {
        "a100-40": TimeTable((1, 4), (0.001, 0.002), (0.0, 0.0), (0.001, 0.002)),
        "board": TimeTable((1,), (9 * 1e-3,), (0.0,), (12 * 1e-3,)),
    }
    # The roofline knows both kinds, the datasheet's and the scenario's own, which is slower.
    assert set(block.times) == {"a100-40", "board"}
    assert block.times["board"].at(8).forward_s > 5 * block.times["a100-40"].at(8).forward_s


def test_a_good_scenario_can_be_planned(folder: Path) -> None:
    scenario = read_scenario(folder / "scenario.yaml")
    assert make_plan("pipedream", scenario).global_batch == 32


def test_parts_may_stand_in_files_of_their_own(folder: Path) -> None:
    whole = read_scenario(folder / "scenario.yaml")
    data = yaml.safe_load(GOOD)
    (folder / "parts").mkdir()
    for part in ("cluster", "model", "training"):
        (folder / "parts" / f"{part}.yaml").write_text(yaml.safe_dump(data[part]))
        data[part] = f"parts/{part}.yaml"
    # Paths in a part are relative to its own file.
    (folder / "model.py").rename(folder / "parts" / "model.py")
    (folder / "split.yaml").write_text(yaml.safe_dump(data))
    split = read_scenario(folder / "split.yaml")
    assert (split.name, split.cluster.devices, split.cluster.links) == (
        whole.name,
        whole.cluster.devices,
        whole.cluster.links,
    )
    assert (split.model.layers, split.training) == (whole.model.layers, whole.training)
    assert split.code is not None
    assert split.code.path == (folder / "parts" / "model.py").resolve()


def assert_same(one: Scenario, other: Scenario) -> None:
    assert (one.name, one.training, one.code) == (other.name, other.training, other.code)
    assert (one.cluster.devices, one.cluster.links) == (other.cluster.devices, other.cluster.links)
    assert (one.model.name, one.model.layers) == (other.model.name, other.model.layers)


def test_what_training_and_packets_can_say(folder: Path) -> None:
    text = GOOD.replace("latency: 20 ms,", "latency: 20 ms, jitter: 5 ms, loss: 0.001,")
    text = text.replace("model:\n", "model:\n  precision: bf16\n").replace(
        "weight_decay: 0.1}",
        "weight_decay: 0.1, schedule: {shape: cosine, warmup_steps: 10,\n    "
        "decay_steps: 100, final_share: 0.1}}\n  precision: bf16\n  clip_norm: 1\n  noise_scale: true",
    )
    (folder / "scenario.yaml").write_text(text)
    scenario = read_scenario(folder / "scenario.yaml")
    packets = [(link.jitter_s, link.loss) for link in scenario.cluster.links]
    assert packets == [(0.0, 0.0), (0.005, 0.001), (0.005, 0.001), (0.0, 0.0), (0.0, 0.0)]
    optimizer = Optimizer("adamw", 0.001, 0.9, 0.1, LearningRateSchedule("cosine", 10, 100, 0.1))
    assert scenario.training == Training(32, 4, optimizer, "bf16", 7, 1.0, True)


def test_a_resolved_scenario_and_back(folder: Path) -> None:
    scenario = read_scenario(folder / "scenario.yaml")
    write_resolved_scenario(scenario, folder / "resolved.json")
    assert_same(read_resolved_scenario(folder / "resolved.json"), scenario)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": "x"}', "null", '{"cluster": 3}'])
def test_what_ropebridge_did_not_write_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "resolved.json").write_text(content)
    with pytest.raises(InputError, match=r"resolved\.json: .*not a resolved scenario"):
        read_resolved_scenario(tmp_path / "resolved.json")


def test_a_missing_resolved_scenario_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"resolved\.json: there is no such file"):
        read_resolved_scenario(tmp_path / "resolved.json")


def test_traces_come_from_files_presets_and_steps(folder: Path) -> None:
    (folder / "link.csv").write_text("time_s,bandwidth_mbps\n0,8\n10,0\n15,4\n")
    entries = {
        "file": "{file: link.csv, after: hold}",
        "preset": "{preset: cloud-wan, duration: 30 s, seed: 3}",
        "steps": "{steps: [{at: 0 s, bandwidth: 1 Mbit/s}, {at: 5 s, bandwidth: 0 Mbit/s}], after: hold}",
    }
    traces = {}
    for name, entry in entries.items():
        text = GOOD.replace("bandwidth: 100 Mbit/s, latency: 20 ms", f"trace: {entry}, latency: 20 ms")
        (folder / "scenario.yaml").write_text(text)
        link = read_scenario(folder / "scenario.yaml").cluster.links[1]
        assert link.trace is not None
        assert link.bandwidth_bps == link.trace.mean_bps
        traces[name] = link.trace
    assert list(traces["file"].bandwidth_bps) == [8e6, 0.0, 4e6]
    assert not traces["file"].loops
    assert (traces["preset"].duration_s, traces["preset"].loops) == (30.0, True)
    assert (list(traces["steps"].bandwidth_bps), traces["steps"].loops) == ([1e6, 0.0], False)


def test_the_schema_knows_the_parts_and_refuses_other_keys() -> None:
    schema = scenario_schema()
    assert set(schema["properties"]) == {"name", "cluster", "model", "training", "effects", "faults", "data"}
    assert schema["required"] == ["name", "cluster", "model", "training"]
    assert schema["additionalProperties"] is False
    assert {"from", "to", "between", "inside"} <= set(schema["$defs"]["LinkEntry"]["properties"])


# Those beside them without a cluster are parts that several share.
FOLDER = Path(__file__).parents[3] / "experiments" / "scenarios"
READY = [path for path in sorted(FOLDER.glob("*.yaml")) if "\ncluster:" in path.read_text()]


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_the_ready_scenarios_can_be_read(path: Path) -> None:
    assert read_scenario(path).name == path.stem


def test_a_part_that_is_not_there_is_named_with_its_place(folder: Path) -> None:
    (folder / "s.yaml").write_text("name: x\ncluster: nowhere.yaml\nmodel: m.yaml\ntraining: t.yaml\n")
    with pytest.raises(InputError) as caught:
        read_scenario(folder / "s.yaml")
    assert str(caught.value) == f"{folder / 's.yaml'}:2: cluster: there is no such file: 'nowhere.yaml'; check the path"


def test_errors_inside_a_part_name_its_file(folder: Path) -> None:
    data: dict[str, Any] = yaml.safe_load(GOOD)
    data["training"]["optimizer"]["learning_rate"] = -1
    (folder / "training.yaml").write_text(yaml.safe_dump(data["training"]))
    data["training"] = "training.yaml"
    (folder / "s.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(InputError) as caught:
        read_scenario(folder / "s.yaml")
    assert str(caught.value).startswith(f"{folder / 'training.yaml'}:")
    assert "optimizer.learning_rate: -1 is not valid; input should be greater than 0" in str(caught.value)
