"""`auto` makes no plan whose gradient sums are over tensor-parallel groups of unlike sizes if the model is trained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from executor.validate import check_groups
from planner.cost.synchronisation import uneven_sum
from planner.files.plan import read_plan
from planner.files.scenario import read_scenario
from planner.systems.auto.portfolio import Searched, searched, searched_once
from planner.systems.auto.strategy import auto
from tests.helpers.processes.command import ropebridge
from traces.common.errors import InputError

# Embedding and head share their table; neither device of host "b" has room for many layers.
CONFIG = {
    "model_type": "gpt2",
    "n_layer": 8,
    "n_embd": 2048,
    "n_head": 16,
    "n_positions": 512,
    "vocab_size": 50304,
}
HOST = {"region": "here", "interconnect": "nvlink-3"}
SCENARIO = {
    "name": "uneven",
    "cluster": {
        "hosts": [
            {"name": "a", "kind": "a100-40", "devices": 1, "memory": "8 GB", **HOST},
            {"name": "b", "kind": "v100-16", "devices": 2, "memory": "3 GB", **HOST},
        ],
        "links": [{"inside": "here", "bandwidth": "100 Gbit/s", "latency": "0.1 ms"}],
    },
    "model": {"name": "uneven", "huggingface": "config.json", "tokens": 512},
    "training": {"global_batch": 4, "precision": "bf16", "optimizer": {"name": "adamw"}},
}


def test_tied_ends_are_in_groups_of_equal_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path, target = tmp_path / "scenario.yaml", tmp_path / "plan.json"
    path.write_text(json.dumps(SCENARIO))
    scenario = read_scenario(path)
    untrained = auto(replace(scenario, code=None))
    assert uneven_sum(untrained, scenario) is not None, "the scenario no longer tempts the search"
    with pytest.raises(InputError, match="share tied layers"):
        check_groups(untrained, scenario)
    assert ropebridge("plan", path, "--strategy", "auto", "-o", target).returncode == 0
    check_groups(read_plan(target), scenario)


@pytest.mark.parametrize("search", [searched, searched_once])
def test_the_searches_of_the_policy_know_that_the_model_is_trained(search: Searched, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "scenario.yaml").write_text(json.dumps(SCENARIO))
    scenario = read_scenario(tmp_path / "scenario.yaml")
    check_groups(search(scenario, frozenset())[0], scenario)
