"""Hosts, size curves, effects and faults in a scenario file, and in a resolved one."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.files.resolved_scenario import read_resolved_scenario, write_resolved_scenario
from planner.files.scenario import read_scenario, scenario_schema
from planner.scenario.cluster import Device, Link
from planner.scenario.effects import (
    TCP,
    WIDE_AREA_TCP,
    ComputeEffects,
    Effects,
    MemoryEffects,
    NetworkEffects,
    Slowdown,
    Straggler,
)
from planner.scenario.faults import Absence, Fault, Hang, LinkOutage
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Scenario
from planner.scenario.size_curve import SizeCurve
from planner.scenario.training import OPTIMIZER_STATES, PRECISIONS, SHAPES, LearningRateSchedule, Optimizer, Training
from tests.helpers.scenarios.builders import chain_scenario
from traces.common.errors import InputError

SCENARIO = """\
name: hosts
cluster:
  devices:
    - {name: a0, kind: a100-40, region: west, host: box, interface: 25 Gbit/s}
    - {name: a1, kind: a100-40, region: west, host: box, interface: 25 Gbit/s}
    - {name: b0, kind: a100-40, region: east, host: tower}
  links:
    - {inside: box, bandwidth: 300 GB/s, latency: 5 us}
    - {between: [box, tower], bandwidth: 1 Gbit/s, latency: 20 ms}
    - between: [west, east]
      latency: 30 ms
      size_curve: {quadratic: -0.005, linear: 0.1, constant: 1.2, ceiling: 20 Gbit/s}
model:
  name: tiny
  layers:
    - {name: layer, repeat: 3, parameters: 4 MB, output: 1 MB, activation: 2 MB, forward: 1 GFLOP}
training: {global_batch: 8}
"""


def read(folder: Path, more: str = "") -> Scenario:
    (folder / "hosts.yaml").write_text(SCENARIO + more)
    return read_scenario(folder / "hosts.yaml")


def refusal(folder: Path, more: str) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, more)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(str(folder / "hosts.yaml")).removeprefix(":").strip()


def test_hosts_and_size_curves(tmp_path: Path) -> None:
    cluster = read(tmp_path).cluster
    assert [(device.machine, device.interface_bps) for device in cluster.devices] == [
        ("box", 25e9),
        ("box", 25e9),
        ("tower", math.inf),
    ]
    assert [link.name for link in cluster.path("a0", "a1")] == ["box->box"]
    assert [link.name for link in cluster.path("a0", "b0")] == ["box->network", "box->tower"]
    curved = cluster.links[3]
    assert (curved.name, curved.size_curve) == ("west->east", SizeCurve(-0.005, 0.1, 1.2, 20e9))
    # Without a rate of its own, a planner counts on the ceiling.
    assert curved.bandwidth_bps == 20e9
    assert cluster.links[0].size_curve is None


@pytest.mark.parametrize(
    ("more", "effects"),
    [
        ("", Effects(WIDE_AREA_TCP)),
        ("effects: {}\nfaults: []\n", Effects(WIDE_AREA_TCP)),
        ("effects: {memory: {framework: 1 GiB}}\n", Effects(WIDE_AREA_TCP, memory=MemoryEffects(2**30))),
        ("effects: none\n", Effects()),
    ],
)
def test_links_have_tcp_s_effects_unless_the_file_says_otherwise(tmp_path: Path, more: str, effects: Effects) -> None:
    scenario = read(tmp_path, more)
    assert (scenario.effects, scenario.faults) == (effects, ())


def test_all_effects(tmp_path: Path) -> None:
    (tmp_path / "speed.csv").write_text("time_s,speed\n0,1\n\n30,0.5\n90.5,0\n100,1.2\n")
    effects = """
effects:
  network:
    base: ideal
    share: 0.8
    payload_efficiency: 0.9
    window: 8 MB
    ready_notice: true
    cold_start: true
    idle: 1 s
    initial_window: 20 kB
  compute:
    launch_overhead: 20 us
    jitter: 0.05
    seed: 3
    transfers_block: true
    stragglers: [{device: a0, factor: 1.5}]
    slowdowns:
      - {device: a1, file: speed.csv}
      - {device: b0, pieces: [{from: 10 s, speed: 0.5}, {from: 1 min, speed: 1}]}
  memory: {framework: 1 GiB, workspace_share: 0.5}
"""
    assert read(tmp_path, effects).effects == Effects(
        NetworkEffects(
            share=0.8,
            payload_efficiency=0.9,
            window_bytes=8e6,
            ready_notice=True,
            cold_start=True,
            idle_s=1.0,
            initial_window_bytes=20e3,
        ),
        ComputeEffects(
            20 * 1e-6,
            0.05,
            3,
            (Straggler("a0", 1.5),),
            (
                Slowdown("a1", (0.0, 30.0, 90.5, 100.0), (1.0, 0.5, 0.0, 1.2)),
                Slowdown("b0", (0.0, 10.0, 60.0), (1.0, 0.5, 1.0)),
            ),
            True,
        ),
        MemoryEffects(2**30, 0.5),
    )


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("ideal", NetworkEffects()),
        ("tcp", TCP),
        ("tcp-wide-area", WIDE_AREA_TCP),
        ("{base: tcp-wide-area, share: 0.5}", replace(TCP, idle_s=math.inf, share=0.5)),
        ("{base: tcp, cold_start: false, window: unlimited}", replace(TCP, cold_start=False, window_bytes=math.inf)),
        ("{ready_notice: false}", replace(WIDE_AREA_TCP, ready_notice=False)),
    ],
)
def test_the_network_by_name_or_one_by_one(network: str, expected: NetworkEffects, tmp_path: Path) -> None:
    assert read(tmp_path, f"effects: {{network: {network}}}\n").effects == Effects(expected)


EVENTS = "0,add,n1\n0,add,n2\n10000,remove,n1\n40000,add,n3\n"


def test_all_faults(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text(EVENTS)
    faults = """
faults:
  - {device: b0, leaves: 30 s, returns: 90 s}
  - {device: b0, leaves: 2 min}
  - {device: b0, hangs: 5 s, goes_on: 6 s}
  - {link: 'box->tower', out: 10 s, back: 25 s}
  - {preemption: spot.csv, devices: [a0, a1]}
"""
    assert read(tmp_path, faults).faults == (
        Absence("b0", 30.0, 90.0),
        Absence("b0", 120.0),
        Hang("b0", 5.0, 6.0),
        LinkOutage("box->tower", 10.0, 25.0),
        Absence("a0", 10.0, 40.0),
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", (Absence("b0", 0.0), Absence("a0", 10.0, 40.0))),
        ("from: 35 s", (Absence("a0", 0.0, 5.0), Absence("b0", 0.0))),
        ("nodes: {n1: b0}", (Absence("b0", 10.0),)),
        ("nodes: {n1: b0, n3: b0}, from: 5 s", (Absence("b0", 5.0, 35.0),)),
        ("format: node-events, devices: [a1]", (Absence("a1", 10.0, 40.0),)),
    ],
)
def test_pre_emptions(keys: str, expected: tuple[Fault, ...], tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text(EVENTS)
    more = f", {keys}" if keys else ""
    assert read(tmp_path, f"faults: [{{preemption: spot.csv{more}}}]\n").faults == expected


def test_effects_and_faults_may_stand_in_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "effects.yaml").write_text(
        "network: tcp\ncompute: {slowdowns: [{device: a0, file: speed.csv}]}\n"
    )
    (tmp_path / "parts" / "speed.csv").write_text("time_s,speed\n5,2\n")
    (tmp_path / "parts" / "faults.yaml").write_text("- {preemption: spot.csv, nodes: {n1: a0}}\n")
    (tmp_path / "parts" / "spot.csv").write_text(EVENTS)
    scenario = read(tmp_path, "effects: parts/effects.yaml\nfaults: parts/faults.yaml\n")
    assert scenario.effects == Effects(TCP, ComputeEffects(slowdowns=(Slowdown("a0", (0.0, 5.0), (1.0, 2.0)),)))
    assert scenario.faults == (Absence("a0", 10.0),)
    (tmp_path / "parts" / "faults.yaml").write_text("- {device: a9, leaves: 3 s}\n")
    with pytest.raises(InputError, match=r"parts/faults.yaml:1: \[0\].device: unknown device 'a9'"):
        read(tmp_path, "faults: parts/faults.yaml\n")


MISTAKES: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown effect": ("effects: {netwrk: tcp}", ("18: effects.netwrk", "did you mean 'network'?")),
    "unknown base": (
        "effects: {network: tpc}",
        ("18: effects.network", "'tpc' is not valid", "'ideal', 'tcp' or 'tcp-wide-area'"),
    ),
    "unknown key of the network": (
        "effects: {network: {windw: 1 MB}}",
        ("18: effects.network.windw", "did you mean 'window'?"),
    ),
    "window without unit": ("effects: {network: {window: 4}}", ("effects.network.window", "4 has no unit")),
    "efficiency beyond all": (
        "effects: {network: {payload_efficiency: 1.5}}",
        ("effects.network", "payload efficiency 1.5", "1 at most"),
    ),
    "jitter below zero": ("effects: {compute: {jitter: -0.1}}", ("effects.compute", "jitter -0.1", "0 to 10")),
    "unknown key of compute": ("effects: {compute: {jiter: 1}}", ("effects.compute.jiter", "did you mean 'jitter'?")),
    "unknown straggler": (
        "effects: {compute: {stragglers: [{device: a7, factor: 2}]}}",
        ("effects.compute.stragglers[0].device", "unknown device 'a7'", "valid: a0, a1, b0"),
    ),
    "straggler that takes no time": (
        "effects: {compute: {stragglers: [{device: a0, factor: 0}]}}",
        ("effects.compute.stragglers[0].factor", "takes 0 times as long", "above zero"),
    ),
    "slow-down without speeds": (
        "effects: {compute: {slowdowns: [{device: a0}]}}",
        ("effects.compute.slowdowns[0]", "needs its speeds", "'file' and 'pieces'"),
    ),
    "slow-down file that is not there": (
        "effects: {compute: {slowdowns: [{device: a0, file: none.csv}]}}",
        ("effects.compute.slowdowns[0]", "none.csv", "cannot be read"),
    ),
    "slow-down backwards": (
        "effects: {compute: {slowdowns: [{device: a0, pieces: [{from: 5 s, speed: 1}, {from: 5 s, speed: 2}]}]}}",
        ("effects.compute.slowdowns[0]", "from 5 s to 5 s", "rise"),
    ),
    "device that stands still for ever": (
        "effects: {compute: {slowdowns: [{device: a0, pieces: [{from: 5 s, speed: 0}]}]}}",
        ("effects.compute.slowdowns[0]", "stands still for ever from 5 s on", "fault"),
    ),
    "unknown key of a fault": (
        "faults: [{devise: a0, leaves: 3 s}]",
        ("18: faults[0].devise", "did you mean 'device'?"),
    ),
    "fault of nothing": ("faults: [{}]", ("faults[0]", "a fault of nothing", "'device' with 'leaves'")),
    "device that is out": ("faults: [{device: a0, out: 3 s}]", ("faults[0]", "a fault of 'device', 'out'", "'link'")),
    "link that is never back": ("faults: [{link: 'a->b', out: 3 s}]", ("faults[0]", "'link' with 'out' and 'back'")),
    "unknown device": (
        "faults: [{device: a9, leaves: 3 s}]",
        ("faults[0].device", "unknown device 'a9'", "a0, a1, b0"),
    ),
    "unknown link": (
        "faults: [{link: 'box->towr', out: 3 s, back: 4 s}]",
        ("faults[0].link", "unknown link 'box->towr'", "did you mean 'box->tower'?"),
    ),
    "fault without unit": ("faults: [{device: a0, leaves: 3}]", ("faults[0].leaves", "3 has no unit")),
    "fault backwards": (
        "faults: [{device: a0, leaves: 3 s, returns: 2 s}]",
        ("faults[0]", "a fault from 3 s to 2 s", "a later end"),
    ),
    "faults at the same time": (
        "faults: [{device: a0, leaves: 3 s}, {device: a0, hangs: 9 s, goes_on: 10 s}]",
        ("faults[1]", "device 'a0' has two faults at the same time, from 3 s and from 9 s", "faults[0]"),
    ),
    "no trace of pre-emptions": ("faults: [{preemption: none.csv}]", ("faults[0].preemption", "none.csv", "read")),
    "unknown node": (
        "faults: [{preemption: spot.csv, nodes: {n9: a0}}]",
        ("faults[0].nodes.n9", "unknown node 'n9'", "valid: n1, n2, n3"),
    ),
    "unknown device of a node": ("faults: [{preemption: spot.csv, nodes: {n1: a9}}]", ("faults[0].nodes.n1", "'a9'")),
    "unknown device to be taken": ("faults: [{preemption: spot.csv, devices: [a9]}]", ("faults[0].devices[0]", "'a9'")),
    "nodes and devices": (
        "faults: [{preemption: spot.csv, devices: [a0], nodes: {n1: a0}}]",
        ("faults[0]", "'devices', 'nodes', 'preemption'", "one of 'devices' and 'nodes'"),
    ),
    "unknown format": (
        "faults: [{preemption: spot.csv, format: node-event}]",
        ("faults[0].format", "unknown pre-emption format 'node-event'", "did you mean 'node-events'?"),
    ),
    "another format": (
        "faults: [{preemption: spot.csv, format: spot-counts}]",
        ("faults[0].preemption", "spot.csv", "is not JSON"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_place(mistake: str, tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text(EVENTS)
    more, expected = MISTAKES[mistake]
    message = refusal(tmp_path, f"{more}\n")
    position = 0
    for part in expected:
        found = message.find(part, position)
        assert found >= 0, f"{part!r} is not in {message!r} after {message[:position]!r}"
        position = found + len(part)


@pytest.mark.parametrize(
    ("content", "place", "problem"),
    [
        ("", "", "is empty"),
        ("time,speed\n0,1\n", ":1", "the header is 'time,speed'; give a header 'time_s,speed'"),
        ("time_s,speed\n", ":1", "no row follows the header"),
        ("time_s,speed\n0,1,2\n", ":2", "the row has 3 columns"),
        ("time_s,speed\n0,fast\n", ":2", "speed 'fast' is not a number"),
        ("time_s,speed\n0,1\n\n0,2\n", ":4", "time goes from 0 s to 0 s; times must rise"),
        ("time_s,speed\n0,-1\n", ":2", "speed '-1' is negative"),
    ],
)
def test_a_wrong_file_of_speeds(content: str, place: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "speed.csv").write_text(content)
    message = refusal(tmp_path, "effects: {compute: {slowdowns: [{device: a0, file: speed.csv}]}}\n")
    assert f"effects.compute.slowdowns[0]: {tmp_path / 'speed.csv'}{place}: {problem}" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("constant: 1.2", "constant: -1.2"), ("cluster.links[2].size_curve", "a message of", "above zero for every")),
        (("constant: 1.2, ", ""), ("cluster.links[2].size_curve", "the key 'constant' is missing")),
        (("ceiling: 20 Gbit/s", "ceiling: 20"), ("cluster.links[2].size_curve.ceiling", "20 has no unit")),
        (("ceiling: 20 Gbit/s", "ceiling: 0 bit/s"), ("cluster.links[2].size_curve", "0 bit/s")),
        (("interface: 25 Gbit/s}\n    - {name: b", "interface: 1 Gbit/s}\n    - {name: b"), ("a1", "differ in region")),
        (("host: tower", "host: west"), ("cluster.devices[2].host", "'west' is both a host and a region")),
        (("between: [box, tower]", "between: [box, towr]"), ("cluster.links[1]", "'towr'", "hosts: box, tower")),
        (("interface: 25 Gbit/s", "interface: 0 bit/s"), ("devices[0]", "carries nothing")),
    ],
)
def test_mistakes_of_hosts_and_curves(change: tuple[str, str], expected: tuple[str, ...], tmp_path: Path) -> None:
    assert change[0] in SCENARIO
    count = 2 if "0 bit/s" in change[1] and "interface" in change[1] else 1
    (tmp_path / "hosts.yaml").write_text(SCENARIO.replace(*change, count))
    with pytest.raises(InputError) as caught:
        read_scenario(tmp_path / "hosts.yaml")
    for part in expected:
        assert part in str(caught.value)


def test_a_trace_may_end(tmp_path: Path) -> None:
    text = SCENARIO.replace("bandwidth: 1 Gbit/s", "trace: {preset: cloud-wan, duration: 30 s, after: end}")
    (tmp_path / "hosts.yaml").write_text(text)
    scenario = read_scenario(tmp_path / "hosts.yaml")
    trace = scenario.cluster.links[1].trace
    assert trace is not None
    assert (trace.loops, trace.ends, trace.duration_s) == (False, True, 30.0)
    write_resolved_scenario(scenario, tmp_path / "resolved.json")
    assert read_resolved_scenario(tmp_path / "resolved.json").cluster.links == scenario.cluster.links


# Resolved scenarios.

TIMES_S = st.floats(0, 1e6)
NAMES = st.text(min_size=1, max_size=5)
SPANS = st.tuples(TIMES_S, st.floats(1e-3, 1e6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
OPEN_SPANS = SPANS | TIMES_S.map(lambda start_s: (start_s, math.inf))
FAULTS: st.SearchStrategy[Fault] = st.one_of(
    st.builds(lambda name, span: Absence(name, *span), NAMES, OPEN_SPANS),
    st.builds(lambda name, span: Hang(name, *span), NAMES, OPEN_SPANS),
    st.builds(lambda name, span: LinkOutage(name, *span), NAMES, SPANS),
)
NETWORKS = st.builds(
    NetworkEffects,
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.floats(1, 1e9) | st.just(math.inf),
    st.booleans(),
    st.booleans(),
    TIMES_S,
    st.floats(1, 1e6),
)
SPEEDS = st.lists(st.tuples(st.floats(0.001, 1e3), st.floats(0, 3)), max_size=3)


@st.composite
def slowdowns(draw: st.DrawFn) -> Slowdown:
    steps = draw(SPEEDS)
    times_s = [0.0]
    for step_s, _ in steps:
        times_s.append(times_s[-1] + step_s)
    return Slowdown(draw(NAMES), tuple(times_s), (*(speed for _, speed in steps), 1.0))


COMPUTES = st.builds(
    ComputeEffects,
    TIMES_S,
    st.floats(0, 10),
    st.integers(0, 2**40),
    st.lists(st.builds(Straggler, NAMES, st.floats(0.1, 9)), max_size=2, unique_by=lambda each: each.device).map(tuple),
    st.lists(slowdowns(), max_size=2, unique_by=lambda each: each.device).map(tuple),
    st.booleans(),
)
MEMORIES = st.builds(MemoryEffects, st.integers(0, 2**40), st.floats(0, 3))
CURVES = st.builds(SizeCurve, *[st.floats(-5, 5)] * 3, st.floats(1e3, 1e11))
RATE_SCHEDULES = st.builds(
    LearningRateSchedule, st.sampled_from(SHAPES), st.integers(0, 10**6), st.integers(1, 10**6), st.floats(0, 1)
)
OPTIMIZERS = st.builds(
    Optimizer,
    st.sampled_from(sorted(OPTIMIZER_STATES)),
    st.floats(1e-6, 10),
    st.floats(0, 0.99),
    st.floats(0, 1),
    RATE_SCHEDULES,
)
TRAININGS = st.builds(
    Training,
    st.integers(1, 10**6),
    st.integers(0, 10**6),
    OPTIMIZERS,
    st.sampled_from(sorted(PRECISIONS)),
    st.integers(0, 2**62),
    st.none() | st.floats(1e-6, 1e6),
    st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    effects=st.builds(Effects, NETWORKS, COMPUTES, MEMORIES),
    faults=st.lists(FAULTS, max_size=4).map(tuple),
    curve=st.none() | CURVES,
    interface_bps=st.floats(1, 1e12) | st.just(math.inf),
    packets=st.tuples(TIMES_S, st.floats(0, 1, exclude_max=True)),
    training=TRAININGS,
)
def test_a_resolved_scenario_and_back(
    effects: Effects,
    faults: tuple[Fault, ...],
    curve: SizeCurve | None,
    interface_bps: float,
    packets: tuple[float, float],
    training: Training,
    tmp_path: Path,
) -> None:
    base = chain_scenario([1.0, 1.0], [1.0, 1.0])
    devices = tuple(replace(device, interface_bps=interface_bps) for device in base.cluster.devices)
    jitter_s, loss = packets
    links = tuple(replace(link, size_curve=curve, jitter_s=jitter_s, loss=loss) for link in base.cluster.links)
    cluster = type(base.cluster)(devices, links)
    scenario = replace(base, cluster=cluster, effects=effects, faults=faults, training=training)
    write_resolved_scenario(scenario, tmp_path / "resolved.json")
    again = read_resolved_scenario(tmp_path / "resolved.json")
    assert (again.effects, again.faults, again.training) == (effects, faults, training)
    assert (again.cluster.devices, again.cluster.links) == (devices, links)
    # Strict JSON: no word that only Python knows.
    json.loads((tmp_path / "resolved.json").read_text(), parse_constant=pytest.fail)


def test_the_profiles_of_tensor_parallel_groups_are_resolved_too(tmp_path: Path) -> None:
    base = chain_scenario([1.0, 1.0], [1.0, 1.0])
    halved = ModelProfile("chain", tuple(replace(layer, parameter_bytes=2000) for layer in base.model.layers))
    scenario = replace(base, model=replace(base.model, sharded={2: halved}))
    write_resolved_scenario(scenario, tmp_path / "resolved.json")
    again = read_resolved_scenario(tmp_path / "resolved.json").model
    assert (again.layers, again.at_degree(2).layers) == (base.model.layers, halved.layers)


def test_a_resolved_scenario_of_before_reads_with_the_defaults(tmp_path: Path) -> None:
    scenario = chain_scenario([1.0, 1.0], [1.0, 1.0])
    path = tmp_path / "resolved.json"
    write_resolved_scenario(scenario, path)
    data = json.loads(path.read_text())
    del data["effects"], data["faults"]
    for device in data["cluster"]["devices"]:
        del device["host"], device["interface_bps"]
    for link in data["cluster"]["links"]:
        del link["size_curve"], link["jitter_s"], link["loss"]
    del data["training"]["optimizer"]["schedule"], data["training"]["clip_norm"], data["training"]["noise_scale"]
    path.write_text(json.dumps(data))
    again = read_resolved_scenario(path)
    assert (again.effects, again.faults, again.training) == (Effects(), (), scenario.training)
    assert (again.cluster.devices, again.cluster.links) == (scenario.cluster.devices, scenario.cluster.links)


def test_every_field_of_cluster_and_training_has_its_key() -> None:
    definitions = scenario_schema()["$defs"]
    assert len(definitions["DeviceEntry"]["properties"]) == len(fields(Device))
    # Of a link, `source` and `target` are written in three ways; a price is given in US dollars.
    assert {"size_curve", "trace", "latency", "jitter", "loss"} <= set(definitions["LinkEntry"]["properties"])
    assert len(definitions["LinkEntry"]["properties"]) == len(fields(Link)) + 2
    assert set(definitions["TrainingEntry"]["properties"]) == {field.name for field in fields(Training)}
    assert set(definitions["OptimizerEntry"]["properties"]) == {field.name for field in fields(Optimizer)}
    assert set(definitions["ScheduleEntry"]["properties"]) == {field.name for field in fields(LearningRateSchedule)}
    assert {"enum": ["ideal", "tcp", "tcp-wide-area"]} in definitions["EffectsEntry"]["properties"]["network"]["anyOf"]
