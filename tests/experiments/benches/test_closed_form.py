import json
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, log2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.benches.planning.planner_fleets import PUBLISHED_FLEETS, ZONE, fleet_scenario
from experiments.benches.sailor.closed_form import judge
from experiments.benches.sailor.closed_form_tables import JudgeTables, read_judge_tables
from experiments.benches.sailor.measured_files import MeasuredFiles
from planner.check import check_plan
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.systems.registry import make_plan
from tests.helpers.scenarios.fleet_files import (
    ACTIVATION_VALUES,
    BACKWARD_S,
    FORWARD_S,
    LAYERS,
    OUTPUT_VALUES,
    PARAMETERS,
    UPDATE_S,
    between_gigabytes_per_s,
    write_fleet_files,
)
from traces.common.errors import InputError

A100, V100 = ("A100-40", "V100-16")
Shape = tuple[tuple[str, int], ...]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> MeasuredFiles:
    return write_fleet_files(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def scenario(files: MeasuredFiles) -> Scenario:
    return fleet_scenario("small", 16, 16, 16, files)


def tables_of(files: MeasuredFiles) -> JudgeTables:
    return read_judge_tables(files, ZONE)


def groups(scenario: Scenario, kind: str, degree: int) -> list[Replica]:
    """All groups of a kind, each inside a node."""
    names = [device.name for device in scenario.cluster.devices if device.kind == kind.lower()]
    return [Replica(names[i], partners=tuple(names[i + 1 : i + degree])) for i in range(0, len(names), degree)]


def pipelines(
    scenario: Scenario, shape: Shape, layers: tuple[int, ...], copies: int, microbatches: tuple[int, ...]
) -> Plan:
    """Equal pipelines, each stage one group of (kind, degree); larger groups are formed first, inside nodes."""
    free = {kind: [d.name for d in scenario.cluster.devices if d.kind == kind.lower()] for kind in (A100, V100)}
    replicas: dict[tuple[int, int], Replica] = {}
    for degree in (4, 2, 1):
        for stage, (kind, own) in enumerate(shape):
            for copy in range(copies if own == degree else 0):
                first, *partners = (free[kind].pop(0) for _ in range(degree))
                replicas[copy, stage] = Replica(first, partners=tuple(partners))
    ends = np.cumsum(layers).tolist()
    made = tuple(
        Pipeline(
            tuple(
                Stage(end - count, end, (replicas[copy, stage],), min(len(layers) - stage, len(microbatches)))
                for stage, (end, count) in enumerate(zip(ends, layers, strict=True))
            ),
            microbatches,
        )
        for copy in range(copies)
    )
    return Plan(scenario.name, scenario.model.name, "by hand", "1f1b", made)


def test_two_stages_by_hand(scenario: Scenario, files: MeasuredFiles) -> None:
    # One layer on an A100 alone, three on two V100 that share each layer; 4 microbatches of 2 samples, 2 pipelines.
    plan = pipelines(scenario, ((A100, 1), (V100, 2)), (1, 3), copies=2, microbatches=(2,) * 4)
    verdict = judge(plan, scenario, tables_of(files))
    first_s, second_s = 2 * 0.03 * 1, 2 * 0.09 * 3 / 2
    message_s = 2 * 4 * OUTPUT_VALUES / 1e9  # At 1 GB/s: the A100 end has one GPU.
    first_transfer_s, second_transfer_s = message_s, 2 * message_s
    assert verdict.compute_s == pytest.approx(3 * second_s + first_s + second_s)
    assert verdict.transfer_s == pytest.approx(3 * second_transfer_s + first_transfer_s + second_transfer_s)
    assert verdict.update_s == pytest.approx(max(UPDATE_S[A100], UPDATE_S[V100] / 2))
    # Stage 0: 40 MB whole at 2 GB/s; stage 1: 120 MB / 2 at 1 GB/s; each twice half of it.
    assert verdict.sync_s == pytest.approx(max(40e6 / 2e9, 60e6 / 1e9))
    parts = (verdict.compute_s, verdict.transfer_s, verdict.update_s, verdict.sync_s)
    assert verdict.iteration_s == pytest.approx(sum(parts))
    assert verdict.fits


stage_kinds = st.tuples(st.sampled_from((A100, V100)), st.sampled_from((1, 2, 4)))


@settings(max_examples=60)
@given(st.data())
def test_equal_pipelines_of_one_layer_a_stage_equal_the_formula(
    scenario: Scenario, files: MeasuredFiles, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(stage_kinds, min_size=LAYERS, max_size=LAYERS), "stages"))
    samples, count = data.draw(st.sampled_from((1, 2, 4))), data.draw(st.integers(1, 6))
    plan = pipelines(scenario, shape, (1,) * LAYERS, copies=1, microbatches=(samples,) * count)
    message = samples * 4 * OUTPUT_VALUES / 1e9

    def hop_s(one: int, other: int) -> float:
        gpus = min(shape[one][1], shape[other][1])
        return message / between_gigabytes_per_s(shape[one][0], shape[other][0], gpus)

    compute_s = [samples * (FORWARD_S[kind] + BACKWARD_S[kind]) / degree for kind, degree in shape]
    # Four stages are more than three: the first sends as if twice.
    transfer_s = [2 * hop_s(0, 1), hop_s(1, 2) + hop_s(1, 0), hop_s(2, 3) + hop_s(2, 1), 2 * hop_s(3, 2)]
    slowest_s = max(c + t for c, t in zip(compute_s, transfer_s, strict=True))
    update_s = max(UPDATE_S[kind] / degree for kind, degree in shape)
    expected_s = (count - 1) * slowest_s + sum(transfer_s) + sum(compute_s) + update_s
    assert judge(plan, scenario, tables_of(files)).iteration_s == pytest.approx(expected_s)


def test_a_ring_counts_the_smallest_degree_of_its_replicas(scenario: Scenario, files: MeasuredFiles) -> None:
    pair, four, alone = groups(scenario, V100, 2)[0], groups(scenario, V100, 4)[1], groups(scenario, V100, 1)[:3]
    for replicas, degree in (([pair, four], 2), (alone, 1)):
        plan = Plan("small", "Toy-1", "by hand", "1f1b", (one_stage(replicas, (len(replicas),)),))
        size_bytes, count = 4 * PARAMETERS * LAYERS / degree, len(replicas)
        expected_s = 2 * (count - 1) * size_bytes / count / 1e9
        assert judge(plan, scenario, tables_of(files)).sync_s == pytest.approx(expected_s)


def test_a_ring_goes_in_buckets_at_the_rate_of_their_parts(scenario: Scenario, tmp_path: Path) -> None:
    files = write_fleet_files(tmp_path)
    layer = {"params_floats": 80_000_000, "act_output_floats": 1, "act_mem_floats": 1}
    files.sizes.write_text(json.dumps({"Toy-1": {"1": {str(number): layer for number in range(LAYERS)}}}))
    # 2 GB/s for 1 MB, and half of one more each time that the size doubles.
    curve = [[0.0, 0.5, 2.0], 1e9]
    files.network.write_text(json.dumps({ZONE: {V100: {"1": {ZONE: {V100: {"1": curve}}}}}}))
    plan = Plan("small", "Toy-1", "by hand", "1f1b", (one_stage(groups(scenario, V100, 1)[:2], (2,)),))
    # 1.28 GB: two whole buckets and one of 280 MB, each in two parts, two times round.
    expected_s = sum(2 * part / 1e3 / (2 + 0.5 * log2(part)) for part in (250, 250, 140))
    assert judge(plan, scenario, tables_of(files)).sync_s == pytest.approx(expected_s)


def one_stage(replicas: Sequence[Replica], microbatches: tuple[int, ...]) -> Pipeline:
    return Pipeline((Stage(0, LAYERS, tuple(replicas), 1),), microbatches)


def test_what_the_form_cannot_express_is_taken_at_its_worst(scenario: Scenario, files: MeasuredFiles) -> None:
    tables = tables_of(files)
    alone = groups(scenario, V100, 1)[:2]

    def verdict_s(replicas: list[Replica], microbatches: tuple[int, ...]) -> float:
        plan = Plan("small", "Toy-1", "by hand", "1f1b", (one_stage(replicas, microbatches),))
        return judge(plan, scenario, tables).compute_s

    assert verdict_s(alone, (4, 2)) == verdict_s(alone, (4, 4))
    uneven = [replace(alone[0], share=3.0), alone[1]]
    assert verdict_s(uneven, (4, 4)) == pytest.approx(1.5 * verdict_s(alone, (4, 4)))
    mixed = [groups(scenario, A100, 1)[0], alone[1]]
    assert verdict_s(mixed, (4, 4)) == verdict_s(alone, (4, 4))


def test_a_replica_without_samples_sends_nothing(scenario: Scenario, files: MeasuredFiles) -> None:
    busy, idle, last = groups(scenario, V100, 1)[:3]
    first = Stage(0, 2, (busy, replace(idle, share=0.01)), 2)
    plan = Plan("small", "Toy-1", "by hand", "1f1b", (Pipeline((first, Stage(2, LAYERS, (last,), 1)), (2,)),))
    alone = replace(first, replicas=(busy,))
    without = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(alone, plan.pipelines[0].stages[1])),))
    tables = tables_of(files)
    assert judge(plan, scenario, tables).transfer_s == judge(without, scenario, tables).transfer_s > 0


def test_pipelines_of_their_own_cuts_sum_what_they_share(scenario: Scenario, files: MeasuredFiles) -> None:
    reps = groups(scenario, V100, 1)
    first = Pipeline((Stage(0, 1, (reps[0],), 2), Stage(1, LAYERS, (reps[1],), 1)), (1,) * 4)
    second = Pipeline((Stage(0, 3, (reps[2],), 2), Stage(3, LAYERS, (reps[3],), 1)), (1,) * 2)
    plan = Plan("small", "Toy-1", "by hand", "1f1b", (first, second))
    # Layers 0, 1 and 2, and 3; the stages of three layers sum two rings of 120 MB together, half of it two times.
    assert judge(plan, scenario, tables_of(files)).sync_s == pytest.approx(120e6 / 1e9)
    alone = replace(plan, pipelines=(first,))
    assert judge(alone, scenario, tables_of(files)).sync_s == 0


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_memory_is_counted_by_the_published_rule(files: MeasuredFiles, scenario: Scenario, kept: int) -> None:
    # As many microbatches as stages are left are kept, however many there are.
    shape: Shape = ((V100, 1),) * kept
    layers = (LAYERS - kept + 1, *(1,) * (kept - 1))
    plan = pipelines(scenario, shape, layers, copies=1, microbatches=(1,))
    needed = layers[0] * (24 * PARAMETERS + 4 * ACTIVATION_VALUES * kept) + 2_000_000_000
    for spare, fits in ((0, True), (-1, False)):
        devices = tuple(replace(device, memory_bytes=needed + spare) for device in scenario.cluster.devices)
        smaller = replace(scenario, cluster=replace(scenario.cluster, devices=devices))
        assert judge(plan, smaller, tables_of(files)).fits is fits


def test_what_nobody_measured_is_refused(files: MeasuredFiles, scenario: Scenario) -> None:
    devices = tuple(replace(device, kind="rtx-3090") for device in scenario.cluster.devices)
    other = replace(scenario, cluster=replace(scenario.cluster, devices=devices))
    plan = Plan("small", "Toy-1", "by hand", "1f1b", (one_stage(groups(scenario, A100, 1)[:1], (1,)),))
    with pytest.raises(InputError, match="unknown GPU kind 'RTX-3090'"):
        judge(plan, other, tables_of(files))
    first, *rest = (device.name for device in scenario.cluster.devices[:3])
    threes = replace(plan, pipelines=(one_stage((Replica(first, partners=tuple(rest)),), (1,)),))
    with pytest.raises(InputError, match="unknown tensor parallelism '3'"):
        judge(threes, scenario, tables_of(files))


@pytest.fixture
def published(shared_folder: Path) -> MeasuredFiles:
    folder = shared_folder / "profiles" / "sailor"
    network = folder / "providers" / "multizone_bandwidths_het.json"
    return MeasuredFiles(folder, folder / "layer_times.json", folder / "layer_sizes.json", network, "OPT-350")


def test_the_best_plan_of_the_brute_force_gets_its_published_figure(published: MeasuredFiles) -> None:
    # Found by enumerating equal pipelines of the 32 + 96 GPUs; independently, the best known is said to reach .2015.
    fleet = PUBLISHED_FLEETS[0]
    scenario = fleet_scenario(fleet.name, fleet.a100, fleet.v100, 1024, published)
    plan = pipelines(scenario, ((V100, 4), (V100, 2), (A100, 2)), (9, 4, 13), 16, (2,) * ceil(1024 / (2 * 16)))
    check_plan(plan, scenario)
    verdict = judge(plan, scenario, tables_of(published))
    assert verdict.fits
    assert round(1 / verdict.iteration_s, 4) == 0.2015


@pytest.mark.parametrize(
    ("number", "least_per_s"),
    [(0, 0.2078), pytest.param(1, 0.4051, marks=pytest.mark.slow), pytest.param(2, 0.562, marks=pytest.mark.slow)],
)
def test_auto_that_searches_by_its_own_evaluator_is_as_good(
    number: int, least_per_s: float, published: MeasuredFiles
) -> None:
    """Bars of `bench planner`. Transfers block here, and plans are compared in an order that they do not keep."""
    fleet = PUBLISHED_FLEETS[number]
    scenario = fleet_scenario(fleet.name, fleet.a100, fleet.v100, 1024, published)
    verdict = judge(make_plan("auto", scenario), scenario, tables_of(published))
    assert verdict.fits
    assert 1 / verdict.iteration_s >= least_per_s
