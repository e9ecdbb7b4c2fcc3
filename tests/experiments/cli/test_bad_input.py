"""Wrong input through the real command: exit status 2, one message, no traceback, nothing half-written."""

# size: one table after another of wrong files and words, each with what is said of it

import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from planner.files.resolved_scenario import write_resolved_scenario
from planner.files.scenario import read_scenario
from tests.helpers.processes.command import COMMAND, ropebridge

SCENARIO = """
name: small
cluster:
  devices:
    - {name: left, kind: t4, region: west}
    - {name: right, kind: v100-16, region: east}
  links:
    - {between: [west, east], bandwidth: 100 Mbit/s, latency: 10 ms}
model:
  name: tiny
  layers:
    - {name: layer, repeat: 4, parameters: 4 MB, output: 1 MB, activation: 2 MB, forward: 1 GFLOP}
training: {global_batch: 8, microbatch: 2}
"""


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    text = SCENARIO
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "small.yaml"
    path.write_text(text)
    return path


def assert_refused(arguments: list[object], folder: Path, *expected: str) -> None:
    """Exit 2, one line on stderr with all that is expected in it, and no new file."""
    before = sorted(folder.rglob("*"))
    done = ropebridge(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for text in expected:
        assert text in done.stderr
    assert sorted(folder.rglob("*")) == before


BAD_SCENARIOS = {
    "unknown key": ([("kind: t4", "knid: t4")], ["small.yaml:5", "devices[0].knid", "did you mean 'kind'"]),
    "unknown part": ([("training:", "trainin:")], ["small.yaml:", "unknown key 'trainin'", "did you mean 'training'"]),
    "unknown device kind": ([("kind: t4", "kind: t44")], ["devices[0].kind", "'t44'", "did you mean 't4'"]),
    "missing unit": ([("100 Mbit/s", "100")], ["small.yaml:8", "links[0].bandwidth", "has no unit", "'100 Mbit/s'"]),
    "all packets lost": (
        [("latency: 10 ms", "latency: 10 ms, loss: 1.5")],
        ["small.yaml:8", "links[0].loss", "west->east loses 1.5", "below 1"],
    ),
    "clipped to nothing": (
        [("microbatch: 2}", "microbatch: 2, clip_norm: 0}")],
        ["small.yaml:13", "training.clip_norm", "greater than 0"],
    ),
    "an unknown rule of the rate": (
        [("microbatch: 2}", "microbatch: 2, batch: {to: 32, learning_rate: adascal}}")],
        ["small.yaml:13", "training.batch.learning_rate", "unknown rule 'adascal'", "did you mean 'adascale'"],
    ),
    "limits without the batch": (
        [("microbatch: 2}", "microbatch: 2, batch: {from: 16, to: 32, learning_rate: sqrt}}")],
        ["small.yaml:13", "training.batch", "begins with the global batch of 8 samples", "let 'from' be at most 8"],
    ),
    "limits in reverse": (
        [("microbatch: 2}", "microbatch: 2, batch: {to: 4, learning_rate: sqrt}}")],
        ["small.yaml:13", "training.batch.to", "no batch lies between 8 and 4", "at least 'from'"],
    ),
    "a batch without a rule": (
        [("microbatch: 2}", "microbatch: 2, batch: {to: 32}}")],
        ["small.yaml:13", "the key 'learning_rate' is missing"],
    ),
    "noise in no order": (
        [
            (
                "microbatch: 2}",
                "microbatch: 2, batch: {to: 32, learning_rate: sqrt, noise_scale: [{samples: 9, noise_scale: 5}, "
                "{samples: 9, noise_scale: 6}]}}",
            )
        ],
        ["small.yaml:13", "training.batch.noise_scale", "the points are not in order", "increasing"],
    ),
    "a rate that never falls": (
        [("microbatch: 2}", "microbatch: 2, optimizer: {schedule: {shape: linear}}}")],
        ["small.yaml:13", "optimizer.schedule.decay_steps", "0 steps of decay", "1 step or more"],
    ),
    "unknown unit": ([("10 ms", "10 parsec")], ["links[0].latency", "'10 parsec'", "ms"]),
    "negative rate": ([("100 Mbit/s", "-5 Mbit/s")], ["links[0].bandwidth", "'-5 Mbit/s'", "not negative"]),
    "zero rate": ([("100 Mbit/s", "0 Mbit/s")], ["small.yaml", "west->east", "0 bit/s", "above zero"]),
    "device named twice": ([("name: right", "name: left")], ["devices[1].name", "'left' is named twice"]),
    "link to nowhere": ([("[west, east]", "[west, north]")], ["small.yaml", "links[0]", "'north'", "west, east"]),
    "no link": (
        [("    - {between: [west, east], bandwidth: 100 Mbit/s, latency: 10 ms}\n", "    []\n")],
        ["'west'", "'east'", "between: [west, east]"],
    ),
    "wrong type": ([("global_batch: 8", "global_batch: many")], ["small.yaml:13", "training.global_batch", "'many'"]),
    "batch of nothing": ([("global_batch: 8", "global_batch: 0")], ["training.global_batch", "0", "greater"]),
    "missing key": ([("  name: tiny\n", "")], ["small.yaml", "model", "'name' is missing"]),
    "no memory": ([("activation: 2 MB", "activation: 20 GB")], ["stages[0]", "'left'", "GiB", "free"]),
    "missing model file": (
        [("  name: tiny\n", "  name: tiny\n  code: nowhere.py\n")],
        ["small.yaml:11", "model.code", "nowhere.py", "must be a Python file"],
    ),
    "missing part file": (
        [("training: {global_batch: 8, microbatch: 2}", "training: nowhere.yaml")],
        ["small.yaml:13", "training", "nowhere.yaml", "no such file"],
    ),
    "not YAML": ([("[west, east]", "[west, east")], ["small.yaml:", "not YAML"]),
    "more bytes than 64 bits count": ([("output: 1 MB", "output: 1e12 TB")], ["small.yaml", "1e+24 B", "8 samples"]),
}


@pytest.mark.parametrize("case", BAD_SCENARIOS)
def test_a_wrong_scenario(case: str, tmp_path: Path) -> None:
    changes, expected = BAD_SCENARIOS[case]
    path = write(tmp_path, *changes)
    assert_refused(["simulate", path, "--strategy=megatron", "-o", tmp_path / "run"], tmp_path, *expected)


BAD_RESOLVED = {
    "an unknown optimizer": ('"name": "sgd"', '"name": "."', "unknown optimizer '.'"),
    "an unknown precision": ('"precision": "fp32"', '"precision": "fp"', "unknown precision 'fp'"),
    "no samples": ('"global_batch": 8', '"global_batch": 0', "0 samples are no batch"),
    "text for a number": ('"latency_s": 0.01', '"latency_s": "0.01"', "'0.01' is not a value of type float"),
    "a fraction of a sample": ('"global_batch": 8', '"global_batch": 8.5', "'8.5' is not a value of type int"),
    "a number below zero": ('"bandwidth_bps": 100000000.0', '"bandwidth_bps": -5.0', "bandwidth_bps is -5.0"),
    "no number": ('"latency_s": 0.01', '"latency_s": NaN', "latency_s is nan"),
    "too many bytes": ('"output_bytes": 1000000', f'"output_bytes": {10**30}', "1e+30 B"),
}


@pytest.mark.parametrize("case", BAD_RESOLVED)
def test_a_wrong_resolved_scenario(case: str, tmp_path: Path) -> None:
    old, new, expected = BAD_RESOLVED[case]
    path = tmp_path / "scenario.json"
    write_resolved_scenario(read_scenario(write(tmp_path)), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert_refused(["simulate", path, "--strategy=megatron", "-o", tmp_path / "run"], tmp_path, str(path), expected)


def test_a_path_that_leads_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    deployed = ["deploy", write(tmp_path), "--strategy=megatron", "--target=ssh", "--hosts=hosts.yaml", "-o", "loop"]
    assert_refused(deployed, tmp_path, "Symlink loop", "loop")


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    run = ["simulate", write(tmp_path), "--strategy=megatron", "--steps=1", "-o", "\udcfe"]
    assert_refused(run, tmp_path, "\\udcfe", "is no Unicode text")


TRAINING = "training: {global_batch: 8, microbatch: 2}\n"

BAD_FORESEEN = {
    "unknown effect": (
        "effects: {network: {windw: 4 MB}}",
        ["small.yaml:14", "network.windw", "did you mean 'window'"],
    ),
    "no share": ("effects: {network: {payload_efficiency: 95}}", ["effects.network", "efficiency 95", "1 at most"]),
    "jitter of anything": ("effects: {compute: {jitter: a lot}}", ["effects.compute.jitter", "'a lot'", "number"]),
    "unknown straggler": (
        "effects: {compute: {stragglers: [{device: middle, factor: 2}]}}",
        ["stragglers[0].device", "'middle'", "valid: left, right"],
    ),
    "no file of speeds": (
        "effects: {compute: {slowdowns: [{device: left, file: speed.csv}]}}",
        ["slowdowns[0]", "speed.csv", "cannot be read"],
    ),
    "unknown device": ("faults: [{device: lft, leaves: 3 s}]", ["small.yaml:14", "faults[0].device", "mean 'left'"]),
    "unknown link": (
        "faults: [{link: 'west->est', out: 3 s, back: 5 s}]",
        ["faults[0].link", "'west->est'", "did you mean 'west->east'"],
    ),
    "returns before": ("faults: [{device: left, leaves: 3 s, returns: 1 s}]", ["faults[0]", "from 3 s to 1 s"]),
    "no unit": ("faults: [{device: left, leaves: 3}]", ["faults[0].leaves", "3 has no unit", "for example"]),
    "half a fault": ("faults: [{device: left, returns: 3 s}]", ["faults[0]", "'device', 'returns'", "'leaves'"]),
    "no pre-emptions": ("faults: [{preemption: spot.csv}]", ["faults[0].preemption", "spot.csv", "cannot be read"]),
}


@pytest.mark.parametrize("case", BAD_FORESEEN)
def test_wrong_effects_and_faults(case: str, tmp_path: Path) -> None:
    more, expected = BAD_FORESEEN[case]
    path = write(tmp_path, (TRAINING, f"{TRAINING}{more}\n"))
    assert_refused(["simulate", path, "--strategy=megatron", "-o", tmp_path / "run"], tmp_path, *expected)


BAD_PREEMPTIONS = {
    "a node twice": (b"0,add,a\n5,add,a\n", [":2", "'a' arrives but is there already"]),
    "time going backwards": (b"5,add,a\n0,add,b\n", [":2", "0.005 s to 0 s", "not fall"]),
    "no counts": (b'{"gap_seconds": 60, "data": [1, "two"]}', ["data[1]", "not a number"]),
    "no gap": (b'{"metadata": {"gap_seconds": -5}, "data": [1]}', ["metadata.gap_seconds", "not negative"]),
}


@pytest.mark.parametrize("case", BAD_PREEMPTIONS)
def test_a_wrong_trace_of_pre_emptions(case: str, tmp_path: Path) -> None:
    content, expected = BAD_PREEMPTIONS[case]
    (tmp_path / "spot").write_bytes(content)
    path = write(tmp_path, (TRAINING, f"{TRAINING}faults: [{{preemption: spot}}]\n"))
    assert_refused(["simulate", path, "--strategy=megatron"], tmp_path, "faults[0].preemption", "spot", *expected)
    assert_refused(["traces", "show", tmp_path / "spot"], tmp_path, "spot", *expected)


def write_trace(folder: Path, content: bytes) -> Path:
    (folder / "link.trace").write_bytes(content)
    return write(folder, ("bandwidth: 100 Mbit/s", "trace: {file: link.trace}"))


BAD_TRACES = {
    "time going backwards": (b"time_s,bandwidth_mbps\n0,10\n5,12\n3,11\n", ["link.trace", ":4", "5", "3", "rise"]),
    "negative rate": (b"time_s,bandwidth_mbps\n0,10\n5,-12\n", ["link.trace", ":3", "-12"]),
    "missing unit": (b"time_s,bandwidth\n0,10\n", ["link.trace", "'bandwidth'", "bandwidth_mbps"]),
    "empty": (b"", ["link.trace", "empty"]),
    "binary": (bytes(range(256)), ["link.trace", "binary"]),
    "something else": (b"once upon a time\n", ["link.trace"]),
}


@pytest.mark.parametrize("case", BAD_TRACES)
def test_a_wrong_trace(case: str, tmp_path: Path) -> None:
    content, expected = BAD_TRACES[case]
    path = write_trace(tmp_path, content)
    assert_refused(["simulate", path, "--strategy=megatron"], tmp_path, *expected)
    assert_refused(["traces", "show", tmp_path / "link.trace"], tmp_path, *expected)
    assert_refused(["traces", "convert", tmp_path / "link.trace", tmp_path / "out.csv"], tmp_path, *expected)


@pytest.mark.parametrize(("content", "expected"), [(b"", "empty"), (b"\x00\xff\xfe", "binary")])
@pytest.mark.parametrize("place", ["SCENARIO", "--plan"])
def test_an_empty_or_binary_file(place: str, content: bytes, expected: str, tmp_path: Path) -> None:
    bad = tmp_path / ("bad.yaml" if place == "SCENARIO" else "bad.json")
    bad.write_bytes(content)
    arguments = [bad] if place == "SCENARIO" else [write(tmp_path), "--plan", bad]
    assert_refused(["simulate", *arguments], tmp_path, bad.name, expected)


@cache
def good_plan() -> str:
    with TemporaryDirectory() as folder:
        done = ropebridge("plan", write(Path(folder)), "--strategy=megatron", "--json")
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_plan(folder: Path, change: Callable[[dict], object]) -> Path:
    write(folder)
    path = folder / "plan.json"
    plan = json.loads(good_plan())
    change(plan)
    path.write_text(json.dumps(plan, indent=1))
    return path


def stage(plan: dict, number: int) -> dict:
    return plan["pipelines"][0]["stages"][number]


BAD_PLANS: dict[str, tuple[Callable[[dict], object], list[str]]] = {
    "for another model": (lambda plan: plan.update(model="huge"), ["'huge'", "'tiny'", "ropebridge plan"]),
    "unknown device": (lambda plan: stage(plan, 0)["replicas"][0].update(device="lefty"), ["'lefty'", "'left'"]),
    "device twice": (
        lambda plan: stage(plan, 0)["replicas"][0].update(device="right"),
        ["workers 0, 0 (devices right, right)", "devices of its own"],
    ),
    "a layer twice": (lambda plan: stage(plan, 1).update(first_layer=1), ["stages[1]", "starts at layer 2"]),
    "other batch": (lambda plan: plan["pipelines"][0].update(microbatches=[1]), ["1 samples", "global batch of 8"]),
    "deadlock": (lambda plan: stage(plan, 1).update(in_flight=9), ["[2, 9]", "deadlock"]),
    "unknown schedule": (lambda plan: plan.update(schedule="1f2b"), ["'1f2b'", "did you mean '1f1b'"]),
    "unknown key": (
        lambda plan: stage(plan, 0).update(inflight=2),
        ["plan.json:", "stages[0].inflight", "'in_flight'"],
    ),
    "other version": (lambda plan: plan.update(version=99), ["plan.json", "99", "make the plan again"]),
    "wrong type": (lambda plan: stage(plan, 0).update(in_flight="two"), ["stages[0].in_flight", "'two'", "integer"]),
    "stages that share some devices": (
        lambda plan: stage(plan, 1)["replicas"].append({"device": "left"}),
        ["stages[1].replicas[1].device", "'left' is used twice", "all of their devices"],
    ),
    "partner elsewhere": (
        lambda plan: (stage(plan, 0)["replicas"][0].update(partners=["right"]), plan["pipelines"][0]["stages"].pop()),
        ["replicas[0].partners[0]", "in host 'right'", "in one host"],
    ),
    "unknown method": (
        lambda plan: plan.update(synchronisation={"method": "asdg"}),
        ["synchronisation.method", "'asdg'", "did you mean 'asgd'"],
    ),
    "exchanges that are never": (
        lambda plan: plan.update(synchronisation={"method": "ma", "interval_steps": 0}),
        ["synchronisation.interval_steps", "0 steps", "1 or more"],
    ),
    "a single pipeline that does not wait": (
        lambda plan: plan.update(synchronisation={"method": "asgd"}),
        ["synchronisation.method", "'asgd'", "single pipeline"],
    ),
    "no connection": (lambda plan: plan.update(connections=0), ["connections", "0 connections", "1 or more"]),
    "unknown compression": (
        lambda plan: plan.update(compression="int4"),
        ["compression", "'int4'", "did you mean 'int8'"],
    ),
    "recomputed perhaps": (
        lambda plan: stage(plan, 0).update(recompute="perhaps"),
        ["stages[0].recompute", "'perhaps'", "boolean"],
    ),
    "unknown order": (lambda plan: plan.update(order="dynamo"), ["order", "'dynamo'", "did you mean 'dynamic'"]),
    "no orders": (lambda plan: plan.update(schedule="explicit"), ["pipelines[0].orders", "for 0 workers", "2 workers"]),
    "orders of another schedule": (
        lambda plan: plan["pipelines"][0].update(orders=[["0F0"]]),
        ["pipelines[0].orders", "'1f1b'", "'explicit'"],
    ),
    "no action": (
        lambda plan: plan["pipelines"][0].update(orders=[["0F0"], ["1X0"]]),
        ["plan.json:", "orders[1][0]", "'1X0' is not an action", "2F0"],
    ),
    "orders that wait in a cycle": (
        lambda plan: explicit(plan, ["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]),
        ["pipelines[0].orders", "'left' has 0B0 next, which needs 1B0 of device 'right'", "'right' has 1F1 next"],
    ),
}


def explicit(plan: dict, *orders: list[str]) -> None:
    plan["pipelines"][0].update(orders=list(orders), microbatches=[4, 4])
    plan.update(schedule="explicit")


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_wrong_plan(case: str, tmp_path: Path) -> None:
    change, expected = BAD_PLANS[case]
    plan = make_plan(tmp_path, change)
    assert_refused(["simulate", tmp_path / "small.yaml", "--plan", plan], tmp_path, "plan.json", *expected)


@pytest.mark.parametrize("option", ["--schedule=compact-zb", "--dynamic"])
def test_a_wrong_plan_whose_order_is_to_change(option: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, lambda plan: plan["pipelines"][0]["stages"][-1].update(end_layer=99))
    command = ["simulate", tmp_path / "small.yaml", "--plan", plan, option]
    assert_refused(command, tmp_path, "plan.json", "the stages end at layer 99")


def test_a_plan_for_another_scenario(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert ropebridge("plan", "two-regions", "--strategy=megatron", "-o", plan).returncode == 0
    assert_refused(["simulate", write(tmp_path), "--plan", plan], tmp_path, "plan.json", "'gpt-small'", "'tiny'")
    assert_refused(["run", "cloud-edge-end-small", "--plan", plan, "-o", tmp_path / "run"], tmp_path, "'west-gpu'")


MODEL = """
import torch
class Model:
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
    def loss(self, outputs, targets):
        return outputs.sum()
    def samples(self, first, count):
        return torch.ones(count, 4), torch.ones(count, 2)
def build(width=4):
    return Model()
"""
LAYERS = "    - {name: layer, repeat: 4, parameters: 4 MB, output: 1 MB, activation: 2 MB, forward: 1 GFLOP}\n"
FITTING = (
    "    - {name: one, parameters: 80 B, output: 16 B, activation: 2 MB, forward: 1 GFLOP}\n"
    "    - {name: two, parameters: 40 B, output: 8 B, activation: 2 MB, forward: 1 GFLOP}\n"
)

BAD_MODELS = {
    "other number of layers": (MODEL, LAYERS, ["model.py", "has 2 layers", "has 4"]),
    "other parameters": (MODEL, FITTING.replace("80 B", "84 B"), ["layer 0", "80 bytes of parameters", "84"]),
    "other output": (MODEL, FITTING.replace("16 B", "20 B"), ["layer 0", "16 bytes of output", "20"]),
    "no build": ("x = 1\n", FITTING, ["model.py", "no function 'build'"]),
    "fails on import": ("import nowhere\n", FITTING, ["model.py", "nowhere"]),
    "ends on import": ("raise SystemExit(0)\n", FITTING, ["model.py", "fails on import", "SystemExit"]),
    "fails to build": (MODEL.replace("return Model()", "raise ValueError('odd')"), FITTING, ["'build' fails", "odd"]),
    "fails to give samples": (MODEL.replace("return torch.ones(count, 4), ", "return "), FITTING, ["'samples' fails"]),
    "layers that are none": (MODEL.replace("layers = [", "layers = 5 or ["), FITTING, ["'layers' is a int"]),
    "a layer with two outputs": (
        MODEL.replace("torch.nn.Linear(4, 4)", "torch.nn.LSTM(4, 4)"),
        FITTING,
        ["layer 0 returns a tuple", "one tensor"],
    ),
    "shared parameters": (
        MODEL.replace("    def loss", "    layers[1].bias = layers[0].bias\n    def loss", 1),
        FITTING,
        ["share the parameter 'bias'", "own"],
    ),
    "other precision": (
        MODEL.replace("layers = [", "layers = [torch.nn.Identity()] and [").replace(
            "torch.nn.Linear(4, 2)]", "torch.nn.Linear(4, 2).double()]"
        ),
        FITTING,
        ["torch.float64", "torch.float32"],
    ),
    "no loss": (MODEL.replace("def loss", "def lost"), FITTING, ["model.py", "no 'loss'"]),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_model_that_does_not_match(case: str, tmp_path: Path) -> None:
    model, layers, expected = BAD_MODELS[case]
    (tmp_path / "model.py").write_text(model)
    path = write(tmp_path, (LAYERS, layers), ("  name: tiny\n", "  name: tiny\n  code: model.py\n"))
    assert_refused(["run", path, "--strategy=megatron", "-o", tmp_path / "run"], tmp_path, *expected)


def test_wrong_arguments_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    code = "  name: tiny\n  code: model.py\n  arguments: {depth: 3}\n"
    path = write(tmp_path, (LAYERS, FITTING), ("  name: tiny\n", code))
    assert_refused(["run", path, "--strategy=megatron"], tmp_path, "model.py", "depth", "build(width=4)")


def test_a_model_without_code_cannot_be_trained(tmp_path: Path) -> None:
    assert_refused(["run", write(tmp_path), "--strategy=megatron"], tmp_path, "no code", "--compute paced")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["simulate", "two-region"], ["'two-region'", "did you mean 'two-regions'"]),
        (["simulate", "nowhere/at-all.yaml"], ["nowhere/at-all.yaml", "no such file"]),
        (["simulate", "two-regions", "--strategy", "megatrn"], ["'megatrn'", "did you mean 'megatron'"]),
        (["simulate", "two-regions", "--strategy=megatron", "--policy", "deep"], ["'deep'", "depth"]),
        (["simulate", "two-regions", "--plan", "p.json", "--strategy", "ddp"], ["--plan", "--strategy"]),
        (["compare", "nowhere"], ["nowhere", "no such folder"]),
        (["report", "."], ["holds no run"]),
        (["bench", "sweep", "--keep", "runs"], ["bench 'sweep' does not take --keep", "leave it out; adaptation,"]),
        (["bench", "fidelty"], ["'fidelty'", "did you mean 'fidelity'"]),
        (["plan", "two-regions", "--strategy=megatron", "-o", "missing/plan.json"], ["missing", "does not exist"]),
        (["traces", "generate", "lte", "-o", "x.csv", "--duration", "60"], ["--duration: '60' has no unit"]),
        (["simulate", "two-regions", "--strategy=megatron", "--duration", "5"], ["--duration: '5' has no unit"]),
        (["profile", "kind", "-o", "k.yaml", "--limit", "x"], ["--limit: 'x' is not a quantity"]),
    ],
)
def test_wrong_words(arguments: list[object], expected: list[str], tmp_path: Path) -> None:
    assert_refused(arguments, tmp_path, *expected)


ODD_SCENARIOS = {
    "a key that is a list": ("name: small", "? [a, b]\n: 1\nname: small", "plain text"),
    "a list in itself": ("name: small", "name: &a [*a]", "small.yaml"),
    "a name of two lines": ("name: small", 'name: "two\\nlines"', "name"),
    "no name": ("name: left", 'name: ""', "devices[0].name"),
    "a null byte in a path": ("training: {global_batch: 8, microbatch: 2}", 'training: "a\\0b"', "training"),
    "a huge layer": ("output: 1 MB", "output: 1e300 MB", "model.layers[0]"),
    "a huge batch": ("global_batch: 8", "global_batch: 100000000", "training.global_batch"),
    "a negative seed": ("global_batch: 8", "global_batch: 8, seed: -1", "training.seed"),
    "a link with itself": ("[west, east]", "[west, west]", "inside: west"),
    "no time at all": (
        "forward: 1 GFLOP}",
        "times: {t4: {samples: [1], forward: [0 s], backward_input: [0 s], backward_weight: [0 s]}}}",
        "takes no time",
    ),
}


@pytest.mark.parametrize("case", ODD_SCENARIOS)
def test_an_odd_scenario(case: str, tmp_path: Path) -> None:
    old, new, expected = ODD_SCENARIOS[case]
    assert_refused(["simulate", write(tmp_path, (old, new)), "--strategy=megatron"], tmp_path, expected)


def test_odd_files_and_places(tmp_path: Path) -> None:
    path = write(tmp_path)
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert_refused(["simulate", path, "--plan", deep], tmp_path, "deep.json", "nested too deeply")
    assert_refused(["traces", "show", deep], tmp_path, "deep.json")
    for place in (".", "/"):
        assert_refused(["simulate", path, "--strategy=megatron", "-o", place], tmp_path, "this path exists already")
    assert_refused(["simulate", "x" * 300], tmp_path, "unknown scenario")
    assert_refused(["simulate", path, "--strategy=megatron", "-o", "x" * 300], tmp_path, "no folder can be made")
    assert_refused(["run", path, "--strategy=megatron", "-o", tmp_path / "a" / "b" / "run"], tmp_path, "no code")
    assert_refused(["traces", "generate", "lte", "-o", "x.csv", "--set", "mean"], tmp_path, "KEY=VALUE")


def test_a_folder_that_is_there_already_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("mine")
    assert_refused(
        ["simulate", "two-regions", "--strategy=megatron", "-o", tmp_path / "run"],
        tmp_path,
        "run",
        "this path exists already",
    )


def test_what_a_model_prints_does_not_mix_with_the_results(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("print('hello from the model')\n" + MODEL)
    path = write(tmp_path, (LAYERS, FITTING), ("  name: tiny\n", "  name: tiny\n  code: model.py\n"))
    done = ropebridge("run", path, "--strategy=megatron", "--on-this-device", "--steps", 1, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1


@pytest.mark.parametrize("missing", ["--torch-csv", "-o"])
def test_a_plan_that_cannot_be_written_to_both_places_is_written_to_none(missing: str, tmp_path: Path) -> None:
    (other,) = {"--torch-csv", "-o"} - {missing}
    arguments = [
        "plan",
        "two-regions",
        "--strategy=megatron",
        other,
        tmp_path / "there",
        missing,
        tmp_path / "absent" / "file",
    ]
    assert_refused(arguments, tmp_path, "absent/file: the folder", "does not exist; create it first")


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_results_that_cannot_be_written_are_told_in_one_line(verb: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, verb, "two-regions", "--strategy", "megatron", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == "ropebridge: the results cannot be written to the standard output: No space left on device"


def test_a_closed_output_is_told_in_one_line() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "traces", "show", "absent.csv"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the standard output is closed" in done.stderr


def test_a_device_of_another_kind_is_not_trained_on_without_a_word(tmp_path: Path) -> None:
    command = ["run", "two-regions", "--strategy=megatron", "--steps", 2]
    assert_refused(
        command,
        tmp_path,
        "device 'west-gpu'",
        "--compute real: the scenario gives a device of the kind 'jetson-tx2', but torch computes on",
        "--on-this-device",
    )
    done = ropebridge(*command, "--on-this-device", "-o", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "not on the devices of the plan" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["computed_on"]
    ropebridge("report", tmp_path / "run", "-o", tmp_path / "run.html")
    assert f"on {summary['computed_on']} instead of the plan" in (tmp_path / "run.html").read_text()
