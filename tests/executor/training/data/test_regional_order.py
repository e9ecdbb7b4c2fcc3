"""Regions that own data train on their own samples only, each once in a pass, however a plan divides them inside."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.training.data.datasets import IndexedSamples, StreamedSamples
from executor.training.data.loader import BatchPart, SampleLoader
from executor.training.data.order import Batch, DataOrder, stored_data
from executor.training.data.tokens import NextTokens, TokenSamples
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.plan.regional_batch import foreign_samples, regional_runs, stored_parts
from planner.scenario.scenario import Scenario
from planner.scenario.training import TokenFiles
from tests.executor.training.data.test_data_order import Endless, Numbers
from tests.executor.training.data.test_sources import HERE, Countdown, Squares
from tests.helpers.scenarios.builders import mesh_scenario
from traces.common.errors import InputError

REGIONS = ["north", "south", "north", "west"]


def regional_scenario(stored: dict[str, int], global_batch: int = 12) -> Scenario:
    scenario = mesh_scenario(4, [1e-3] * 2, [1e-3] * 2, global_batch=global_batch, regions=REGIONS)
    return replace(scenario, data=stored)


@st.composite
def placed(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """Regions with data, and a plan with some of their devices in one pipeline, some in another."""
    stored = {region: draw(st.integers(1, 30)) for region in ("north", "south", "west")}
    order = draw(st.permutations(range(4)))
    cut = draw(st.integers(1, 4))
    groups = [group for group in (order[:cut], order[cut:]) if group]
    pipelines = []
    for group in groups:
        replicas = tuple(Replica(f"device-{index}", draw(st.sampled_from([1.0, 2.0, 0.5]))) for index in group)
        sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
        pipelines.append(Pipeline((Stage(0, 2, replicas, 1),), tuple(sizes)))
    batch = sum(pipeline.samples for pipeline in pipelines)
    scenario = regional_scenario(stored, batch)
    return scenario, Plan(scenario.name, scenario.model.name, "hand", "1f1b", tuple(pipelines))


@given(placed(), st.integers(60, 200), st.integers(0, 2**63 - 1), st.integers(1, 8))
def test_a_device_gets_samples_of_its_region_alone_and_each_once_in_a_pass(
    case: tuple[Scenario, Plan], size: int, seed: int, steps: int
) -> None:
    scenario, plan = case
    order, whole = DataOrder(Numbers(size), seed), plan.global_batch
    seen: dict[str, list[int]] = {}
    for step in range(steps):
        batch = Batch(step * whole, whole, regional_runs(plan, scenario))
        start = 0
        for pipeline in plan.pipelines:
            for samples in pipeline.microbatches:
                stage = pipeline.stages[0]
                for replica, (first, end) in zip(stage.replicas, stage.intervals(samples), strict=True):
                    if end > first:
                        found = order.samples_of(batch, start + first, end - first)[0].tolist()
                        seen.setdefault(scenario.cluster.by_name[replica.device].region, []).extend(found)
                start += samples
    before = 0
    for region, own in scenario.data.items():
        first, end = (size * edge // sum(scenario.data.values()) for edge in (before, before + own))
        before += own
        found = seen.get(region, [])
        for begin in range(0, len(found), end - first):
            one_pass = found[begin : begin + end - first]
            assert len(set(one_pass)) == len(one_pass)
            assert set(one_pass) <= set(range(first, end))


def test_the_division_of_samples_inside_a_region_does_not_matter() -> None:
    scenario = regional_scenario({"north": 40, "south": 20})

    def samples(pipelines: list[tuple[list[tuple[str, float]], list[int]]]) -> dict[str, list[int]]:
        plan = Plan(
            scenario.name,
            scenario.model.name,
            "hand",
            "1f1b",
            tuple(
                Pipeline((Stage(0, 2, tuple(Replica(*each) for each in replicas), 1),), tuple(sizes))
                for replicas, sizes in pipelines
            ),
        )
        order, batch = DataOrder(Numbers(60), 3), Batch(60, 12, regional_runs(plan, scenario))
        found: dict[str, list[int]] = {}
        for run in batch.regional:
            row = order.samples_of(batch, run.start, run.count)[0].tolist()
            found.setdefault("north" if run.stored.before == 0 else "south", []).extend(row)
        return found

    north, south = [("device-0", 1.0), ("device-2", 3.0)], [("device-1", 1.0)]
    assert samples([(north, [8]), (south, [4])]) == samples([(south, [1, 3]), ([("device-2", 1.0)], [3, 3, 2])])
    assert samples([([*north, *south], [12])]).keys() == {"north", "south"}


def test_the_order_of_a_region_is_the_one_that_was_promised() -> None:
    scenario = regional_scenario({"north": 40, "south": 20})
    keys = np.random.Philox(key=[7, 0], counter=[0, 0, 0, 40]).random_raw(20).tolist()
    expected = [40 + index for index in sorted(range(20), key=keys.__getitem__)]
    south = stored_data(Numbers(60), stored_parts(scenario)["south"], 7)
    assert south.samples(0, 20)[0].tolist() == expected


@given(st.dictionaries(st.sampled_from("abc"), st.integers(1, 5), min_size=1), st.integers(0, 20), st.integers(1, 30))
def test_endless_samples_are_divided_too(stored: dict[str, int], first: int, count: int) -> None:
    parts = stored_parts(regional_scenario(stored))
    found = {
        region: stored_data(Endless(), part, 0).samples(first, count)[0].tolist() for region, part in parts.items()
    }
    for region, part in parts.items():
        for number in found[region]:
            assert part.before <= number % part.whole < part.before + part.own
    everything = [number for row in found.values() for number in row]
    assert len(set(everything)) == len(everything)


def test_every_kind_of_data_set_can_be_divided(tmp_path: Path) -> None:
    np.arange(61, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    tokens = TokenSamples(TokenFiles(tmp_path, 6, "uint16"), 1)
    for data, whole in ((IndexedSamples(Squares(), HERE, 1), len(Squares())), (tokens, 10)):
        parts = stored_parts(regional_scenario({"north": 3, "south": 2}))
        sizes, seen = [], []
        for part in parts.values():
            first, end = part.bounds(whole)
            sizes.append(end - first)
            _, targets = stored_data(data, part, 1).samples(0, end - first)
            seen += [tuple(row.flatten().tolist()) for row in targets]
        _, everything = data.samples(0, whole)
        assert sum(sizes) == whole
        assert sorted(seen) == sorted(tuple(row.flatten().tolist()) for row in everything)
    assert NextTokens(tokens).part(2, 3).size == 3


@pytest.mark.parametrize(
    ("data", "stored", "message"),
    [
        (Numbers(3), {"north": 1, "south": 99}, "the 3 samples of the data set leave none for a region with 1 of 100"),
        (StreamedSamples(lambda: Countdown(31, False), HERE, 1), {"north": 1}, "can only be read in order"),
    ],
)
def test_data_that_cannot_be_divided(data: object, stored: dict[str, int], message: str) -> None:
    part = stored_parts(regional_scenario(stored))["north"]
    with pytest.raises(InputError, match=message):
        stored_data(data, part, 1)  # type: ignore[arg-type]


def test_a_last_stage_elsewhere_needs_targets_of_others() -> None:
    scenario = regional_scenario({"north": 40, "south": 20})

    def found(devices: list[list[str]]) -> tuple[int, str, str] | None:
        stages = tuple(Stage(index, index + 1, tuple(map(Replica, names)), 1) for index, names in enumerate(devices))
        plan = Plan(scenario.name, scenario.model.name, "hand", "1f1b", (Pipeline(stages, (6, 6)),))
        return foreign_samples(plan, scenario)

    assert found([["device-0"], ["device-2"]]) is None
    assert found([["device-0", "device-1"], ["device-2", "device-1"]]) is None
    assert found([["device-0"], ["device-1"]]) == (0, "south", "north")


@given(st.integers(0, 100), st.integers(1, 11))
def test_samples_follow_one_another_after_batches_of_another_size_too(first: int, north: int) -> None:
    scenario = regional_scenario({"north": 1, "south": 1})
    pipelines = [
        Pipeline((Stage(0, 2, (Replica(device),), 1),), (samples,))
        for device, samples in (("device-0", north), ("device-1", 12 - north))
    ]
    plan = Plan(scenario.name, scenario.model.name, "hand", "1f1b", tuple(pipelines))
    batch, order, found = Batch(first, 12, regional_runs(plan, scenario)), DataOrder(Endless(), 0), []
    for _ in range(5):
        found += order.samples_of(batch, 0, north)[0].tolist()
        batch = batch.following()
    assert found == list(range(found[0], found[0] + 2 * len(found), 2))


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_loaded_ahead_are_the_same(workers: int) -> None:
    scenario = regional_scenario({"north": 40, "south": 20})
    stages = (Stage(0, 2, (Replica("device-0"), Replica("device-1")), 1),)
    plan = Plan(scenario.name, scenario.model.name, "hand", "1f1b", (Pipeline(stages, (8, 4)),))
    runs = regional_runs(plan, scenario)
    data = IndexedSamples(Squares(), HERE, seed=5)
    loader, order = SampleLoader(data, 5, workers), DataOrder(data, 5)
    for step, regional in enumerate([runs, runs, (), runs]):
        parts = [BatchPart(a, b - a, True, True) for a, b in pairwise([0, 3, 9, 12])]
        batch = Batch(step * 12, 12, regional)
        loader.start_step(batch, parts)
        for part in parts:
            expected = order.samples_of(batch, part.start, part.count)
            assert torch.equal(loader.inputs(part.start, part.count), expected[0])
            assert torch.equal(loader.targets(part.start, part.count), expected[1])
    loader.close()
