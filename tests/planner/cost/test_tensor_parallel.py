"""Tensor parallelism: what a device of a group computes, holds and sends."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.backend import TorchBackend
from planner.check import check_plan
from planner.cost.memory import needed_bytes
from planner.cost.stage import replica_times, stage_times
from planner.cost.tensor_parallel import interconnect
from planner.events.event import EventKind
from planner.files.importers.transformer import TransformerShape
from planner.files.scenario import read_scenario
from planner.plan.plan import Pipeline, Plan, Stage
from planner.runs.record import RunRecord
from planner.scenario.cluster import Link
from planner.scenario.roofline import LayerWork, roofline_layer, shard_of, sharded_models
from planner.scenario.scenario import Scenario
from planner.scenario.sharding import SHARDINGS, named_sharding
from planner.scenario.training import Training
from sim.simulator import Simulator
from tests.helpers.scenarios.groups import KIND, group, layer, scenario_of
from traces.common.errors import InputError

DEGREES = (1, 2, 4)


@pytest.mark.parametrize("how", SHARDINGS)
@pytest.mark.parametrize("degree", [2, 4])
def test_on_a_free_interconnect_a_group_is_as_fast_as_its_shard(how: str, degree: int) -> None:
    works = [layer("first", "vocabulary", 0, first=True), layer("second", how, 4096)]
    scenario = scenario_of(works, 1)
    alone, shared = (
        replica_times(scenario, Stage(0, 2, (group(0, each),), 1), group(0, each), 64) for each in (1, degree)
    )
    # The arithmetic binds, and all of it is divided: what is left of a pass besides is the launch of its kernels.
    launches = roofline_layer(LayerWork("empty", 0.0, 4, 0, 0), [KIND], "fp32").times["made-up"].at(1)
    for name in ("forward_s", "backward_input_s", "backward_weight_s"):
        whole, part, empty = (getattr(each, name) for each in (alone, shared, launches))
        assert part - 2 * empty == pytest.approx((whole - 2 * empty) / degree, rel=1e-4)


def test_sums_over_the_group_by_hand() -> None:
    works = [layer("first", "vocabulary", 0, first=True), layer("block", "block", 4096)]
    free = scenario_of(works, 2)
    slow = scenario_of(works, 2, inside=Link("", "", 8e6, 0.002))
    pipeline = Pipeline((Stage(0, 1, (group(0, 4),), 1), Stage(1, 2, (group(1, 4),), 1)), (3,))
    for index, forward, backward in ((0, 1, 0), (1, 2, 2)):
        replica = group(index, 4)
        one, other = (stage_times(each, pipeline, index, replica, 3) for each in (free, slow))
        # A ring of four: six rounds of 2 ms, in each a quarter of three samples of 4096 bytes at a megabyte a second.
        sum_s = 6 * (0.002 + 3 * 4096 / 4 / 1e6)
        # What another stage sends is broadcast along the ring in small parts, at the rate of the interconnect.
        message_s = 3 * 0.002 + 3 * 4096 / 1e6
        receives = (0, 1) if index == 0 else (1, 0)
        assert other.forward_s - one.forward_s == pytest.approx(forward * sum_s + receives[0] * message_s)
        assert other.backward_input_s - one.backward_input_s == pytest.approx(
            backward * sum_s + receives[1] * message_s
        )
        assert other.backward_weight_s == one.backward_weight_s


def test_a_shard_holds_its_part() -> None:
    work = replace(
        layer("block", "block", 4096),
        sharding=replace(named_sharding("block", 4096, 4096, 40_000), replicated_parameter_bytes=40_000),
    )
    half = shard_of(work, 2)
    assert half.parameter_bytes == 40_000 + 360_000 / 2
    # The inputs of two norms and of two pairs of matrices are whole on every device.
    assert half.activation_bytes == 4 * 4096 + (40_000 - 4 * 4096) / 2
    scenario = scenario_of([work], 1)
    needed = needed_bytes(scenario, Stage(0, 1, (group(0, 2),), 1), samples=3, in_flight=2, degree=2)
    assert needed == 2 * half.parameter_bytes + 2 * 3 * half.activation_bytes


def test_degrees_are_those_that_divide_every_layer() -> None:
    works = [
        replace(layer("a", "heads", 4096), sharding=named_sharding("heads", 4096, 4096, 0, parts=12)),
        replace(layer("b", "heads", 4096), sharding=named_sharding("heads", 4096, 4096, 0, parts=6)),
        layer("c", None, 4096),
    ]
    assert list(sharded_models("m", works, [KIND], "fp32", 8)) == [2, 3, 6]
    assert sharded_models("m", works[2:], [KIND], "fp32", 8) == {}


def sent(record: RunRecord, scenario: Scenario) -> Counter[tuple[str, str]]:
    """The bytes from one host to another."""
    machine = {device.name: device.machine for device in scenario.cluster.devices}
    found: Counter[tuple[str, str]] = Counter()
    for event in record.events:
        if event.kind is EventKind.SEND:
            found[machine[event.device], machine[event.peer]] += event.size_bytes
    return found


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Scenario, Plan]:
    """One or two equal pipelines of one to three stages, each on a group of a host of its own."""
    stages, pipelines = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    degrees = [draw(st.sampled_from(DEGREES)) for _ in range(stages)]
    works = [layer("first", "vocabulary", 0, first=True)]
    works += [layer(f"layer-{number}", draw(st.sampled_from(SHARDINGS)), 4096) for number in range(stages)]
    bounds = [0, *range(2, stages + 1), stages + 1]
    scenario = scenario_of(works, stages * pipelines)
    made = []
    for number in range(pipelines):
        parts = tuple(
            Stage(bounds[index], bounds[index + 1], (group(number * stages + index, degree),), stages - index)
            for index, degree in enumerate(degrees)
        )
        made.append(Pipeline(parts, (2, 1, 1)))
    return scenario, Plan(scenario.name, scenario.model.name, "hand", "1f1b", tuple(made))


def expected(scenario: Scenario, plan: Plan) -> Counter[tuple[str, str]]:
    """Each boundary once per sample and direction, and half of two pipelines' gradients in each of two rounds."""
    found: Counter[tuple[str, str]] = Counter()
    for number, pipeline in enumerate(plan.pipelines):
        hosts = [stage.replicas[0].device.rpartition("-")[0] for stage in pipeline.stages]
        for index, stage in enumerate(pipeline.stages[:-1]):
            boundary_bytes = pipeline.samples * scenario.model.layers[stage.end_layer - 1].output_bytes
            found[hosts[index], hosts[index + 1]] += boundary_bytes
            found[hosts[index + 1], hosts[index]] += boundary_bytes
        other = plan.pipelines[1 - number] if len(plan.pipelines) == 2 else pipeline
        for stage, beside in zip(pipeline.stages, other.stages, strict=True):
            if beside is not stage:
                degree = stage.replicas[0].tensor_parallel
                shard_bytes = scenario.model.at_degree(degree).parameter_bytes(stage.first_layer, stage.end_layer)
                ends = (stage.replicas[0].device, beside.replicas[0].device)
                found[ends[0].rpartition("-")[0], ends[1].rpartition("-")[0]] += degree * shard_bytes
    return found


@settings(max_examples=60)
@given(grouped())
def test_bytes_between_hosts_are_each_boundary_once_and_every_shard(case: tuple[Scenario, Plan]) -> None:
    scenario, plan = case
    scenario = replace(scenario, training=Training(plan.global_batch))
    check_plan(plan, scenario)
    assert sent(Simulator().run(scenario, plan, None, 1), scenario) == expected(scenario, plan)


def test_a_paced_run_sends_the_same_bytes() -> None:
    works = [layer("first", "vocabulary", 0, first=True), layer("second", "block", 4096)]
    scenario = scenario_of(works, 4)
    pipelines = tuple(
        Pipeline((Stage(0, 1, (group(host, 2),), 2), Stage(1, 2, (group(host + 1, 4),), 1)), (1, 1)) for host in (0, 2)
    )
    plan = Plan(scenario.name, scenario.model.name, "hand", "1f1b", pipelines)
    scenario = replace(scenario, training=Training(plan.global_batch))
    record = TorchBackend("paced", emulator="none").run(scenario, plan, None, 1)
    assert sent(record, scenario) == expected(scenario, plan)


SCENARIO = """
name: two hosts
cluster:
  hosts:
    - {name: big, kind: a100-80, region: east, devices: 4, interconnect: nvlink-3, interface: 25 Gbit/s}
    - {name: small, kind: l4, region: west, devices: 2, interconnect: 20 GB/s}
  links: [{between: [east, west], bandwidth: 1 Gbit/s, latency: 20 ms}]
model:
  name: made up
  layers:
    - {name: embedding, parameters: 500 MiB, output: 32 MiB, activation: 16 KiB, forward: 0 FLOP, shard: vocabulary}
    - {name: block, repeat: 4, parameters: 700 MiB, output: 32 MiB, activation: 6 MiB, forward: 898 GFLOP, shard: block}
    - {name: head, parameters: 500 MiB, output: 250 MiB, activation: 314 MiB, forward: 537 GFLOP, shard: SHARD}
training: {global_batch: 8, precision: bf16}
"""


def test_hosts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(SCENARIO.replace("SHARD", "vocabulary"))
    scenario = read_scenario(path)
    assert [device.name for device in scenario.cluster.devices[:5]] == ["big-0", "big-1", "big-2", "big-3", "small-0"]
    assert scenario.cluster.by_name["big-3"].interface_bps == 25e9
    assert sorted(scenario.model.sharded) == [2, 3, 4]
    inside = interconnect(scenario, ("small-0", "small-1"))
    assert (inside.rate_bps, inside.latency_s) == (160e9, 0.0)
    # 600 GB/s are 300 each way, of which all-reduces reach 69 %.
    assert interconnect(scenario, ("big-0", "big-1")).rate_bps == pytest.approx(0.69 * 300 * 8e9)
    head = scenario.model.at_degree(4).layers[-1]
    # The gradient of the head's input has half of 32 MiB in bfloat16.
    assert head.backward_sums.sample_bytes == 16 * 2**20
    assert head.forward_sums.count == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("SHARD", "columns"), "unknown sharding 'columns'; did you mean 'column'?"),
        (("nvlink-3", "nvlink"), "there is no interconnect 'nvlink'; choose among nvlink-2"),
        (("kind: l4", "kind: l5"), "unknown device kind 'l5'"),
        (("name: small", "name: east"), "'east' is both a host and a region"),
        (("shard: block", "shard: {partz: 2}"), "layers[1].shard.partz: unknown key 'partz'; did you mean 'parts'?"),
        (("shard: block", "shard: {parts: -1}"), "layers[1].shard.parts: -1 is not valid"),
        (("shard: block", "shard: {forward: {count: 1}}"), "layers[1].shard.forward.bytes: the key 'bytes' is missing"),
        (("shard: block", "shard: {activation: 3 feet}"), "layers[1].shard.activation: "),
        (("shard: block", "shard: 3"), "layers[1].shard: 3 is not valid"),
        (("shard: block", "shard: vocabulary"), "a layer in the middle of the model has no vocabulary"),
        (("shard: block", "shard: {like: blocks}"), "unknown sharding 'blocks'; did you mean 'block'?"),
        (("shard: block", "shard: {like: row, activation: 1 B}"), "a named division gives the activations"),
        (
            ("  hosts:", "  kinds: {k: {peak: {fp32: 5 apples}, memory: 1 GB, memory_bandwidth: 1 GB/s}}\n  hosts:"),
            "kinds.k.peak.fp32: ",
        ),
    ],
)
def test_mistakes_are_told_with_their_place(change: tuple[str, str], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(SCENARIO.replace(*change).replace("SHARD", "vocabulary"))
    with pytest.raises(InputError) as refused:
        read_scenario(path)
    assert str(refused.value).startswith(f"{path}:")
    assert problem in str(refused.value)


def test_what_every_device_holds_is_told_beside_a_named_division(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    named = SCENARIO.replace("SHARD", "vocabulary")
    path.write_text(named.replace("shard: block", "shard: {like: block, parameters: 60 MiB, parts: 4}"))
    model = read_scenario(path).model
    assert sorted(model.sharded) == [2, 4]
    block, shard = model.layers[1], model.at_degree(4).layers[1]
    assert shard.parameter_bytes == (60 + 640 / 4) * 2**20
    path.write_text(named)
    plain = read_scenario(path).model.at_degree(4).layers[1]
    assert plain.parameter_bytes == block.parameter_bytes / 4
    assert (shard.activation_bytes, shard.forward_sums) == (plain.activation_bytes, plain.forward_sums)


@given(st.integers(2, 8), st.sampled_from(["fp32", "bf16"]))
def test_every_device_of_a_group_saves_all_tokens(degree: int, precision: str) -> None:
    shape = TransformerShape(
        vocabulary=5040,
        width=64,
        blocks=1,
        heads=8,
        key_value_heads=8,
        head_width=8,
        inner=256,
        embedding_width=64,
        final_norm=False,
    )
    embedding, *_, head = (
        (work, roofline_layer(shard_of(work, degree), [KIND], precision)) for work in shape.layers(16)
    )
    tokens = 8 * 16
    assert embedding[1].activation_bytes == tokens
    # The scores of the head's shard stay float32, beside what enters it: two tensors of the width.
    scores, entering = 4 * 16 * 5040 / degree, (2 if precision == "bf16" else 4) * 16 * 2 * 64
    assert head[1].activation_bytes == pytest.approx(tokens + scores + entering, abs=2)
