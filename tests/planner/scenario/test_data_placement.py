from pathlib import Path

import pytest

from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.files.scenario import read_scenario
from traces.common.errors import InputError

SCENARIO = """\
name: two-places
cluster:
  devices:
    - {name: big, kind: a100-40, region: cloud}
    - {name: small, kind: t4, region: edge}
  links:
    - {between: [cloud, edge], bandwidth: 100 Mbit/s, latency: 20 ms}
model:
  name: little
  layers:
    - {name: block, parameters: 1 MB, output: 2 KiB, activation: 5 kB, forward: 3 GFLOP}
training: {global_batch: 32}
"""


def written(folder: Path, data: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(SCENARIO + data)
    return path


def test_samples_of_each_region(tmp_path: Path) -> None:
    assert read_scenario(written(tmp_path, "data: {cloud: 50000, edge: 25000}\n")).data == {
        "cloud": 50000,
        "edge": 25000,
    }


def test_without_a_word_data_are_everywhere(tmp_path: Path) -> None:
    assert read_scenario(written(tmp_path, "")).data == {}


def test_data_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text("edge: 7\n")
    assert read_scenario(written(tmp_path, "data: data.yaml\n")).data == {"edge": 7}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{cluod: 1}", "scenario.yaml:13: data.cluod: unknown region 'cluod'; did you mean 'cloud'? valid: cloud, "),
        ("{cloud: 0}", "scenario.yaml:13: data.cloud: "),
        ("{cloud: many}", "scenario.yaml:13: data.cloud: "),
        ("[cloud]", "scenario.yaml:13: data: "),
    ],
)
def test_what_is_no_placement(data: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_scenario(written(tmp_path, f"data: {data}\n"))
    assert message in str(caught.value)


@pytest.mark.parametrize("data", ["", "data: {edge: 3}\n"])
def test_a_resolved_scenario_keeps_the_placement(data: str, tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, data))
    write_resolved_scenario(scenario, tmp_path / "scenario.json")
    assert read_resolved_scenario(tmp_path / "scenario.json").data == scenario.data


def test_a_resolved_scenario_without_the_key_has_data_everywhere(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    write_resolved_scenario(read_scenario(written(tmp_path, "")), path)
    text = path.read_text()
    assert ', "data": {}' in text
    path.write_text(text.replace(', "data": {}', ""))
    assert read_resolved_scenario(path).data == {}
