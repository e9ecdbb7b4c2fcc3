import json
from pathlib import Path

import pytest

from experiments.benches.sailor.measured_files import (
    Node,
    SailorNetwork,
    read_inside,
)
from planner.scenario.size_curve import SizeCurve
from traces.common.errors import InputError

CURVE = [[-0.2, 3.0, 12.0], 22e9]
NODE = Node("zone-a", "GH-96", 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"zone-a": {"GH-96": {"1": {"zone-b": {"A100-40": {"4": CURVE}}}}}}))
    return path


def error(path: Path, source: Node, target: Node) -> str:
    with pytest.raises(InputError) as caught:
        SailorNetwork(path).curve(source, target)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_a_curve_between_nodes(path: Path) -> None:
    curve = SailorNetwork(path).curve(NODE, Node("zone-b", "A100-40", 4))
    assert curve == SizeCurve(-0.2, 3.0, 12.0, 8 * 22e9)


def test_what_nobody_measured_is_refused(path: Path) -> None:
    assert error(path, Node("zone-c", "GH-96", 1), NODE) == (
        "network.json: unknown zone 'zone-c'; did you mean 'zone-a'? valid: zone-a"
    )
    assert error(path, Node("zone-a", "GH-96", 2), NODE) == (
        "network.json: zone-a.GH-96: unknown number of GPUs '2'; valid: 1"
    )
    assert error(path, NODE, Node("zone-b", "A100-80", 4)) == (
        "network.json: zone-a.GH-96.1: zone-b: unknown GPU kind 'A100-80'; did you mean 'A100-40'? valid: A100-40"
    )


def test_curves_inside_nodes(tmp_path: Path) -> None:
    path = tmp_path / "inside.json"
    path.write_text(json.dumps({"GH-96": {"2": CURVE}}))
    assert read_inside(path) == {("GH-96", 2): SizeCurve(-0.2, 3.0, 12.0, 8 * 22e9)}


def test_a_malformed_file_is_named(path: Path) -> None:
    path.write_text(json.dumps({"zone-a": 3}))
    assert error(path, NODE, NODE).startswith("network.json: zone-a: Input should be an object")


def test_the_published_files(shared_folder: Path) -> None:
    providers = shared_folder / "profiles" / "sailor" / "providers"
    between = SailorNetwork(providers / "multizone_bandwidths_het.json")
    here, there = Node("us-central1-a", "A100-40", 1), Node("us-west1-b", "A100-40", 1)
    assert between.curve(here, there).rate_bps(64e6) < between.curve(here, here).rate_bps(64e6)
    inside = read_inside(providers / "intra_node_bandwidths.json")
    assert inside["A100-40", 4].rate_bps(64e6) > between.curve(here, here).rate_bps(64e6)
