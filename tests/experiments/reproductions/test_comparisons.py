"""Fair comparisons of strategies: the knobs, the judge, and the verdicts on claims and mechanisms."""

import json
import os
import re
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from experiments.benches.result import judge_claim
from experiments.reproductions.asteroid.settings import CLUSTERS as BOARDS
from experiments.reproductions.asteroid.settings import edge_scenario
from experiments.reproductions.comparisons.ablation import ablation_rows, without_effect
from experiments.reproductions.comparisons.best_plan import best_entry, samples_per_s
from experiments.reproductions.comparisons.contenders import CONTENDERS
from experiments.reproductions.comparisons.knobs import (
    MOST_MICROBATCHES,
    arranged,
    arrangements,
    memory_orders,
    microbatch_sizes,
    subsets,
)
from experiments.reproductions.deepcee.scenarios import deepcee_scenario
from experiments.verbs.bench import REPRODUCTIONS
from planner.check import is_possible
from planner.systems.registry import STRATEGIES, make_plan
from tests.helpers.processes.command import COMMAND
from tests.helpers.scenarios.builders import mesh_scenario
from traces.common.errors import InputError

ROOT = Path(__file__).parents[3]

# Strategies that are no rivals: `auto` starts from the plans of the others, `adaptdl` makes the plan of `ddp` with
# buckets, and `cloudless` and `greedy` train without a barrier, or choose how many devices to rent.
NO_RIVALS = {"auto", "adaptdl", "cloudless", "greedy"}


def test_every_synchronous_strategy_takes_part() -> None:
    assert STRATEGIES.keys() - CONTENDERS.keys() == NO_RIVALS


def test_devices_are_chosen_by_region_or_by_speed() -> None:
    across = deepcee_scenario("data centres", "vit-huge", 1e9, 0.01)
    assert len(list(subsets(across))) == 2**3 - 1
    # Orders of one, two and three of three regions.
    assert len(set(arrangements(across))) == 3 + 3 * 2 + 6
    assert {frozenset(each) for each in memory_orders(across)} == {frozenset(each) for each in subsets(across)}
    alone = edge_scenario("MobileNetV2", BOARDS["4 boards"], 32)
    names = [{device.name for device in each} for each in subsets(alone)]
    assert names[0] == {"tx2-1"}
    assert names[-1] == {device.name for device in alone.cluster.devices}
    assert [len(each) for each in names] == [1, 2, 3, 4]


@pytest.mark.parametrize("batch", [1, 6, 64, 256])
def test_sizes_of_microbatches_divide_the_batch(batch: int) -> None:
    scenario = mesh_scenario(2, [1.0] * 2, [1.0] * 2, global_batch=batch, microbatch=1)
    sizes = microbatch_sizes(scenario)
    assert sizes == sorted(set(sizes))
    assert all(batch % size == 0 and batch // size <= MOST_MICROBATCHES for size in sizes)
    assert microbatch_sizes(scenario, 2) == [size for size in sizes if 2 * size <= max(2, batch)]


@pytest.mark.parametrize("name", ["megatron", "gpipe", "zb-h1-equal", "pipedream", "ddp", "dapple", "asteroid"])
def test_knobs_never_make_a_strategy_slower(name: str) -> None:
    # The second region is slow and far: a plan over both, which strategies without knobs make, is a bad one.
    scenario = mesh_scenario(
        4,
        [0.01] * 4,
        [0.02] * 4,
        output_bytes=[100_000] * 4,
        link=lambda a, b: (1e9, 0.0) if (a < 2) == (b < 2) else (1e6, 1.0),
        parameter_bytes=[4_000_000] * 4,
        global_batch=16,
        microbatch=4,
        regions=["near", "near", "far", "far"],
    )
    best = best_entry(name, scenario)
    plain = make_plan(name, scenario)
    assert best.plan is not None
    assert is_possible(best.plan, scenario)
    assert best.samples_per_s == samples_per_s(best.plan, scenario)
    assert best.samples_per_s >= samples_per_s(plain, scenario)
    assert {scenario.cluster.by_name[device].region for device in best.plan.devices} == {"near"}


def test_a_strategy_without_a_plan_has_no_throughput() -> None:
    scenario = mesh_scenario(2, [1.0] * 2, [1.0] * 2, memory_bytes=1000)
    with pytest.raises(InputError):
        make_plan("gpipe", scenario)
    assert best_entry("gpipe", scenario).plan is None
    assert best_entry("gpipe", scenario).samples_per_s == 0


def test_an_arranged_scenario_has_only_the_links_of_its_devices() -> None:
    scenario = deepcee_scenario("data centres", "vit-huge", 1e9, 0.01)
    devices = next(each for each in arrangements(scenario) if [d.region for d in each] == ["end"] * 2 + ["cloud"] * 2)
    chosen = arranged(scenario, devices, 4)
    assert chosen.cluster.devices == devices
    assert {link.source for link in chosen.cluster.links} == {"end", "cloud"}
    assert chosen.training.microbatch == 4


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([2.0, 1.3], "appears"),
        ([2.0, 1.29, 1.0], "appears in 1 of 3 settings"),
        ([1.0, inf], "appears in 1 of 2 settings"),
        ([1.2], "does not appear"),
        ([], "no setting"),
    ],
)
def test_a_verdict_counts_settings(values: list[float], verdict: str) -> None:
    claim = judge_claim("ratio", "1.3x", values, 1.3, "here")
    assert claim.verdict == verdict
    assert claim.settings == len(values)
    assert claim.least <= claim.measured <= claim.largest


def test_a_claim_of_a_limit_appears_below_it() -> None:
    claim = judge_claim("error", "below 5 %", [4.9, 5.0, 9.0], 5.0, "here", below=True)
    assert claim.verdict == "appears in 1 of 3 settings"


def test_a_mechanism_that_changes_nothing_is_named() -> None:
    rows = ablation_rows({"idle": [1.0, 1.0 + 1e-9], "useful": [1.0, 1.2], "harmful": [0.9], "needed": [inf]})
    assert without_effect(rows) == ["idle"]
    assert [row["moved"] for row in rows] == [0, 1, 1, 1]


def reproduced(name: str, seed: str) -> str:
    done = subprocess.run(
        [*COMMAND, "reproduce", name, "--quick", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_results_are_the_same_on_a_busy_machine(name: str) -> None:
    idle = reproduced(name, "1")
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        busy = reproduced(name, "2")
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert busy == idle


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_every_mechanism_moves_its_row_or_is_named_in_the_docs(name: str) -> None:
    document = json.loads(reproduced(name, "0"))
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "systems" / f"{name}.md").read_text())
    assert document["ablations"]
    for row in document["ablations"]:
        assert row["settings"] > 0
        assert f"| {row['mechanism']} |" in page
        inert = f"Mechanism without effect in every setting: {row['mechanism']}."
        assert (inert in document["remarks"]) == (row["moved"] == 0)
