"""Each mistake in a scenario gives one message: file and line, key, value, and what would be valid."""

# size: one table of mistakes, each with its message.
from pathlib import Path

import pytest

from planner.files.scenario import read_scenario
from traces.common.errors import InputError

GOOD = """\
name: two-places
cluster:
  kinds:
    board:
      peak: 2 TFLOP/s
      memory: 8 GiB
      memory_bandwidth: 50 GB/s
  devices:
    - {name: left, kind: a100-40, region: west}
    - {name: right, kind: board, region: east}
  links:
    - between: [west, east]
      bandwidth: 100 Mbit/s
      latency: 20 ms
    - inside: west
      trace:
        steps: [{at: 0 s, bandwidth: 8 Mbit/s}]
        duration: 10 s
      latency: 1 ms
model:
  name: little
  layers:
    - name: embed
      parameters: 4 MB
      output: 2 KiB
      activation: 3 kB
      times:
        a100-40:
          samples: [1, 4]
          forward: [1 ms, 2 ms]
          backward_input: [0 ms, 0 ms]
          backward_weight: [1 ms, 2 ms]
    - {name: block, repeat: 2, parameters: 1 MB, output: 2 KiB, activation: 5 kB, forward: 3 GFLOP}
training:
  global_batch: 32
  optimizer:
    name: sgd
"""


def refusal(folder: Path, text: str) -> str:
    path = folder / "scenario.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_scenario(path)
    message = str(caught.value)
    assert message.startswith(f"{path}"), message
    assert "\n" not in message
    return message.removeprefix(f"{path}").removeprefix(":").strip()


def test_the_scenario_without_mistakes_is_read(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(GOOD)
    assert read_scenario(tmp_path / "scenario.yaml").name == "two-places"


# What is written, what is written instead, and the parts of the message in their order. A line number goes first
# where the file has one to show.
MISTAKES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "unknown key of the scenario": (
        "training:",
        "trainnig:",
        ("34: trainnig", "unknown key 'trainnig'", "did you mean 'training'?", "valid: name, cluster, model, training"),
    ),
    "unknown key of the cluster": (
        "  devices:",
        "  device:",
        ("8: cluster.device", "unknown key 'device'", "did you mean 'devices'?", "valid: devices, hosts, links, kinds"),
    ),
    "unknown key of a kind": (
        "      peak:",
        "      peek:",
        ("5: cluster.kinds.board.peek", "unknown key 'peek'", "did you mean 'peak'?", "memory_bandwidth"),
    ),
    "unknown key of a device": (
        "region: east}",
        "regoin: east}",
        ("10: cluster.devices[1].regoin", "unknown key 'regoin'", "did you mean 'region'?"),
    ),
    "unknown key of a link": (
        "      latency: 20 ms",
        "      delay: 20 ms",
        ("14: cluster.links[0].delay", "unknown key 'delay'", "valid: between, from, to"),
    ),
    "jitter without a unit": (
        "      latency: 20 ms",
        "      latency: 20 ms\n      jitter: 5",
        ("15: cluster.links[0].jitter", "5 has no unit"),
    ),
    "negative jitter": (
        "      latency: 20 ms",
        "      latency: 20 ms\n      jitter: -5 ms",
        ("15: cluster.links[0].jitter", "'-5 ms'", "not negative"),
    ),
    "more layers than anybody plans": (
        "repeat: 2",
        "repeat: 1000",
        ("22: model.layers: the model has 1,001 layers", "1,000 are possible"),
    ),
    "more microbatches than anybody plans": (
        "  global_batch: 32",
        "  global_batch: 100000\n  microbatch: 4",
        ("36: training.microbatch: 25,000 microbatches", "give 5 samples or more"),
    ),
    "a window smaller than a packet": (
        "training:",
        "effects: {network: {window: 1 B}}\ntraining:",
        ("34: effects.network.window: '1 B' is not valid", "greater than or equal to 536"),
    ),
    "all packets lost": (
        "      latency: 20 ms",
        "      latency: 20 ms\n      loss: 1",
        ("15: cluster.links[0].loss", "the link west->east loses 1 of its packets", "below 1, for example 0.001"),
    ),
    "a loss in percent": (
        "      latency: 20 ms",
        "      latency: 20 ms\n      loss: 0.1 %",
        ("15: cluster.links[0].loss", "'0.1 %' is not valid", "number"),
    ),
    "gradients clipped to nothing": (
        "  global_batch: 32",
        "  global_batch: 32\n  clip_norm: 0",
        ("36: training.clip_norm", "0 is not valid", "greater than 0"),
    ),
    "a microbatch larger than the batch": (
        "  global_batch: 32",
        "  global_batch: 32\n  microbatch: 33",
        ("36: training.microbatch", "a microbatch of 33 samples is larger than the global batch of 32", "32 samples"),
    ),
    "momentum of another rule": (
        "    name: sgd",
        "    name: sgd\n    momentum: 0.9",
        ("training.optimizer.momentum", "update rule 'sgd' takes no momentum", "give 'name: momentum'"),
    ),
    "a rate with an exponent that YAML does not know": (
        "    name: sgd",
        "    name: sgd\n    learning_rate: 1e-3",
        ("training.optimizer.learning_rate", "'1e-3' is not valid", "write 0.001: YAML takes"),
    ),
    "a rate that falls over no steps": (
        "    name: sgd",
        "    schedule: {shape: cosine}",
        ("37: training.optimizer.schedule", "0 steps of decay", "shape 'cosine' falls over 1 step or more"),
    ),
    "unknown shape of the rate": (
        "    name: sgd",
        "    schedule: {shape: cosin}",
        ("37: training.optimizer.schedule.shape", "unknown shape 'cosin'", "did you mean 'cosine'?"),
    ),
    "unknown key of the rate": (
        "    name: sgd",
        "    schedule: {warmup: 10}",
        ("37: training.optimizer.schedule.warmup", "did you mean 'warmup_steps'?"),
    ),
    "a rate that ends above its full value": (
        "    name: sgd",
        "    schedule: {shape: linear, decay_steps: 5, final_share: 1.5}",
        ("37: training.optimizer.schedule.final_share", "a final share of 1.5", "0 to 1"),
    ),
    "unknown key of a trace": (
        "        duration: 10 s",
        "        durations: 10 s",
        ("18: cluster.links[1].trace.durations", "did you mean 'duration'?"),
    ),
    "unknown key of a trace step": (
        "{at: 0 s, bandwidth: 8 Mbit/s}",
        "{at: 0 s, bandwith: 8 Mbit/s}",
        ("17: cluster.links[1].trace.steps[0].bandwith", "did you mean 'bandwidth'?", "valid: at, bandwidth"),
    ),
    "unknown key of the model": ("  layers:", "  layer:", ("22: model.layer", "did you mean 'layers'?")),
    "unknown key of a layer": (
        "      output: 2 KiB",
        "      outputs: 2 KiB",
        ("25: model.layers[0].outputs", "did you mean 'output'?"),
    ),
    "unknown key of a times table": (
        "          samples:",
        "          sample:",
        ("29: model.layers[0].times.a100-40.sample", "unknown key 'sample'", "did you mean 'samples'?"),
    ),
    "unknown key of the training": (
        "  global_batch: 32",
        "  globalbatch: 32",
        ("35: training.globalbatch", "did you mean 'global_batch'?"),
    ),
    "unknown key of the optimizer": (
        "    name: sgd",
        "    kind: sgd",
        ("37: training.optimizer.kind", "unknown key 'kind'", "valid: name, learning_rate"),
    ),
    "missing part": ("training:\n  global_batch: 32\n  optimizer:\n    name: sgd\n", "", ("'training' is missing",)),
    "missing key": (
        "  global_batch: 32\n",
        "",
        ("training.global_batch", "the key 'global_batch' is missing", "add 'global_batch:'"),
    ),
    "bare number for a rate": (
        "bandwidth: 100 Mbit/s",
        "bandwidth: 100",
        ("13: cluster.links[0].bandwidth", "100 has no unit", "for example '100 Mbit/s'"),
    ),
    "bare number for a time": (
        "latency: 20 ms",
        "latency: 20",
        ("14: cluster.links[0].latency", "20 has no unit", "for example '40 ms'"),
    ),
    "bare number in a list": (
        "forward: [1 ms, 2 ms]",
        "forward: [1 ms, 2]",
        ("30: model.layers[0].times.a100-40.forward[1]", "2 has no unit"),
    ),
    "bare number for bytes": (
        "parameters: 4 MB",
        "parameters: 4",
        ("24: model.layers[0].parameters", "4 has no unit", "for example '16 GiB'"),
    ),
    "unknown unit": (
        "bandwidth: 100 Mbit/s",
        "bandwidth: 100 Mbps",
        ("13: cluster.links[0].bandwidth", "'100 Mbps' has the unknown unit 'Mbps'", "Mbit/s"),
    ),
    "negative rate": (
        "bandwidth: 100 Mbit/s",
        "bandwidth: -5 Mbit/s",
        ("13: cluster.links[0].bandwidth", "'-5 Mbit/s' is out of range", "finite and not negative"),
    ),
    "infinite rate": (
        "bandwidth: 100 Mbit/s",
        "bandwidth: 1e999 Mbit/s",
        ("13: cluster.links[0].bandwidth", "'1e999 Mbit/s' is out of range"),
    ),
    "rate of nothing": (
        "bandwidth: 100 Mbit/s",
        "bandwidth: 0 Mbit/s",
        ("cluster.links[0].bandwidth", "carries nothing (0 bit/s)", "above zero"),
    ),
    "trace of outage alone": (
        "bandwidth: 8 Mbit/s",
        "bandwidth: 0 Mbit/s",
        ("cluster.links[1].bandwidth", "the link west->west carries nothing", "above zero"),
    ),
    "peak of nothing": (
        "peak: 2 TFLOP/s",
        "peak: 0 TFLOP/s",
        ("5: cluster.kinds.board.peak", "'0 TFLOP/s'", "above zero"),
    ),
    "braces in a value": (
        "latency: 20 ms",
        "latency: '{20} ms'",
        ("14: cluster.links[0].latency", "'{20} ms' is not a quantity"),
    ),
    "link to nowhere": (
        "inside: west",
        "from: west\n      to: north",
        ("cluster.links[1]", "'north'", "regions: west, east; devices: left, right"),
    ),
    "link given twice": (
        "- inside: west",
        "- from: west\n      to: east",
        ("cluster.links[1]", "the link west->east is given twice"),
    ),
    "link that joins nothing": (
        "    - between: [west, east]\n      bandwidth",
        "    - bandwidth",
        ("12: cluster.links[0]", "does not say what it joins", "'between: [a, b]'"),
    ),
    "link with half an end": (
        "    - inside: west",
        "    - from: west",
        ("15: cluster.links[1]", "does not say what it joins"),
    ),
    "link that joins two things": (
        "    - inside: west",
        "    - inside: west\n      between: [west, east]",
        ("15: cluster.links[1]", "does not say what it joins"),
    ),
    "link between three": (
        "between: [west, east]",
        "between: [west, east, north]",
        ("12: cluster.links[0].between", "is not valid"),
    ),
    "link without bandwidth": (
        "      bandwidth: 100 Mbit/s\n",
        "",
        ("12: cluster.links[0]", "the link has no bandwidth", "'bandwidth: 100 Mbit/s' or a 'trace'"),
    ),
    "link with bandwidth and trace": (
        "    - inside: west\n",
        "    - inside: west\n      bandwidth: 1 Gbit/s\n",
        ("15: cluster.links[1]", "both 'bandwidth' and 'trace'", "give it a 'mean'"),
    ),
    "link without latency": (
        "      latency: 20 ms\n",
        "",
        ("cluster.links[0].latency", "the key 'latency' is missing"),
    ),
    "trace of two kinds": (
        "        duration: 10 s",
        "        preset: lte",
        ("cluster.links[1].trace", "gives preset and steps", "give one of 'file', 'preset' and 'steps'"),
    ),
    "trace of nothing": (
        "        steps: [{at: 0 s, bandwidth: 8 Mbit/s}]\n",
        "",
        ("cluster.links[1].trace", "gives none of them", "give one of"),
    ),
    "trace that loops without end": (
        "        duration: 10 s\n",
        "",
        ("cluster.links[1].trace", "steps with 'after: loop' need a duration", "add 'duration', or 'after: hold'"),
    ),
    "trace that starts late": (
        "{at: 0 s, bandwidth",
        "{at: 1 s, bandwidth",
        ("cluster.links[1].trace", "the first time is 1 s", "times start at 0 s"),
    ),
    "unknown preset": (
        "        steps: [{at: 0 s, bandwidth: 8 Mbit/s}]",
        "        preset: cloud-wam",
        ("cluster.links[1].trace", "'cloud-wam'", "did you mean 'cloud-wan'?"),
    ),
    "another word for what follows": (
        "        duration: 10 s",
        "        after: stop",
        ("18: cluster.links[1].trace.after", "'stop' is not valid", "'loop', 'hold' or 'end'"),
    ),
    "unknown device kind": (
        "kind: a100-40",
        "kind: a100-4O",
        ("9: cluster.devices[0].kind", "unknown device kind 'a100-4O'", "did you mean 'a100-40'?", "valid: board"),
    ),
    "device named twice": (
        "name: right",
        "name: left",
        ("cluster.devices[1].name", "device 'left' is named twice", "already devices[0]"),
    ),
    "device named as a region": (
        "name: right",
        "name: west",
        ("cluster.devices[1].name", "'west' is both a device and a region", "rename one"),
    ),
    "device without memory": (
        "memory: 8 GiB",
        "memory: 0 GiB",
        ("memory", "device 'right' has no memory", "'16 GiB'"),
    ),
    "number for a name": ("name: left", "name: 3", ("9: cluster.devices[0].name", "3 is not valid", "string")),
    "negative price": (
        "region: east}",
        "region: east, price_usd_per_hour: -1}",
        ("10: cluster.devices[1].price_usd_per_hour", "-1 is not valid", "greater than or equal to 0"),
    ),
    "price that is no number": (
        "region: east}",
        "region: east, price_usd_per_hour: .nan}",
        ("10: cluster.devices[1].price_usd_per_hour", "is not valid", "finite"),
    ),
    "text for a number": (
        "global_batch: 32",
        "global_batch: '32'",
        ("35: training.global_batch", "'32' is not valid", "valid integer"),
    ),
    "empty batch": (
        "global_batch: 32",
        "global_batch: 0",
        ("35: training.global_batch", "0 is not valid", "greater than or equal to 1"),
    ),
    "key without a value": (
        "global_batch: 32",
        "global_batch:",
        ("35: training.global_batch: there is no value", "valid integer"),
    ),
    "unknown optimizer": (
        "    name: sgd",
        "    name: adam",
        ("37: training.optimizer.name", "'adam' is not valid", "'adamw'"),
    ),
    "times without a precision, trained in another": (
        "  global_batch: 32",
        "  global_batch: 32\n  precision: bf16",
        ("20: model", "measured in fp32 (no 'precision:' is given), but is trained in bf16", "set 'precision: fp32'"),
    ),
    "times of another precision than that of the training": (
        "model:\n",
        "model:\n  precision: tf32\n",
        ("21: model.precision", "measured in tf32, but is trained in fp32", "set 'precision: tf32' in 'training'"),
    ),
    "unknown precision of a model": (
        "model:\n",
        "model:\n  precision: fp23\n",
        ("21: model.precision", "unknown precision 'fp23'", "did you mean", "valid: fp32, tf32, bf16, fp16, fp8"),
    ),
    "unknown format of messages": (
        "  global_batch: 32",
        "  global_batch: 32\n  compressions: [none, int9]",
        ("36: training.compressions", "unknown compression 'int9'", "did you mean 'int8'?"),
    ),
    "no format of messages": (
        "  global_batch: 32",
        "  global_batch: 32\n  compressions: []",
        ("36: training.compressions", "nothing is no list of formats", "give at least one"),
    ),
    "no bytes for a parameter": (
        "  global_batch: 32",
        "  global_batch: 32\n  bytes_per_parameter: 0",
        ("36: training.bytes_per_parameter", "0 is not valid", "greater than 0"),
    ),
    "unknown framework": (
        "  global_batch: 32",
        "  global_batch: 32\n  framework: megatron",
        ("36: training.framework", "unknown framework 'megatron'", "did you mean 'megatron-lm'?"),
    ),
    "framework of another precision": (
        "  global_batch: 32",
        "  global_batch: 32\n  framework: deepspeed",
        ("36: training.framework", "not known in precision fp32", "known precisions: fp16"),
    ),
    "framework of another optimizer": (
        "  global_batch: 32",
        "  global_batch: 32\n  framework: sailor",
        ("36: training.framework", "not known for optimizer 'sgd'", "known optimizer: adamw"),
    ),
    "framework and number": (
        "  global_batch: 32",
        "  global_batch: 32\n  framework: sailor\n  bytes_per_parameter: 24",
        ("36: training.framework", "two ways to say one number", "remove one"),
    ),
    "unknown precision": (
        "  global_batch: 32",
        "  global_batch: 32\n  precision: bf16-mixed",
        ("36: training.precision", "unknown precision 'bf16-mixed'", "did you mean 'bf16'"),
    ),
    "layer of two kinds": (
        "      times:",
        "      forward: 1 GFLOP\n      times:",
        ("23: model.layers[0]", "the layer needs its compute", "give one of 'forward' and 'times'"),
    ),
    "layer of no kind": (
        ", forward: 3 GFLOP",
        "",
        ("33: model.layers[1]", "the layer needs its compute"),
    ),
    "times table with a row missing": (
        "samples: [1, 4]",
        "samples: [1, 4, 9]",
        ("model.layers[0]", "columns of a time table differ in length"),
    ),
    "times table that falls": (
        "samples: [1, 4]",
        "samples: [4, 1]",
        ("model.layers[0]", "sample counts [4, 1]", "rise from row to row"),
    ),
    "model code that is not there": (
        "  name: little",
        "  name: little\n  code: modle.py",
        ("22: model.code", "there is no model file 'modle.py'", "must be a Python file"),
    ),
    "model without costs": (
        GOOD[GOOD.index("  layers:") : GOOD.index("training:")],
        "",
        ("20: model", "the model needs its costs", "give one of 'layers', 'sailor' and 'huggingface'"),
    ),
    "argument of a wrong type": (
        "  name: little",
        "  name: little\n  arguments: {width: [1]}",
        ("22: model.arguments.width", "[1] is not valid"),
    ),
    "part that is a number": (
        "training:\n  global_batch: 32\n  optimizer:\n    name: sgd",
        "training: 3",
        ("training",),
    ),
    "argument that is no number": (
        "  name: little",
        "  name: little\n  arguments: {width: .nan}",
        ("22: model.arguments.width", "nan is not valid"),
    ),
    "key that YAML takes for true": (
        "  global_batch: 32",
        "  global_batch: 32\n  on: 3",
        ("training", "unknown key 'true'", "global_batch"),
    ),
    "key that YAML takes for a number": (
        "      bandwidth: 100 Mbit/s",
        "      bandwidth: 100 Mbit/s\n      5: 3",
        ("cluster.links[0]", "unknown key '5'", "between"),
    ),
    "date for a key": ("  global_batch: 32", "  2026-01-01: 32", ("training", "2026-01-01")),
    "tab for indentation": ("  global_batch: 32", "\tglobal_batch: 32", ("35", "not YAML")),
    "quote that never ends": ("name: two-places", "name: 'two-places", ("not YAML", "check indentation and quotes")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_place_value_and_what_would_be_valid(tmp_path: Path, mistake: str) -> None:
    right, wrong, expected = MISTAKES[mistake]
    assert GOOD.count(right) >= 1
    message = refusal(tmp_path, GOOD.replace(right, wrong, 1))
    position = 0
    for part in expected:
        found = message.find(part, position)
        assert found >= 0, f"{part!r} is not in {message!r} after {message[:position]!r}"
        position = found + len(part)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    assert "global_batch" in refusal(
        tmp_path, GOOD.replace("  global_batch: 32", "  global_batch: 32\n  global_batch: 64")
    )


@pytest.mark.parametrize("kind", ["Board", "str", "board[1]"])
def test_any_name_of_a_kind_is_kept_in_the_place(tmp_path: Path, kind: str) -> None:
    text = (
        GOOD.replace("board", kind).replace(f"kind: {kind},", f'kind: "{kind}",').replace("peak: 2 TFLOP/s", "peak: 2")
    )
    assert refusal(tmp_path, text).startswith(f"5: cluster.kinds.{kind}.peak: 2 has no unit")


@pytest.mark.parametrize("content", ["[]", "3", "name", "- a: 1"])
def test_what_is_no_scenario_is_refused(tmp_path: Path, content: str) -> None:
    assert refusal(tmp_path, content) == "this is not a scenario; write keys: name, cluster, model, training"


@pytest.mark.parametrize("content", ["", " \n", "# nothing\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    assert refusal(tmp_path, content)


def test_a_missing_trace_file_is_named(tmp_path: Path) -> None:
    text = GOOD.replace("steps: [{at: 0 s, bandwidth: 8 Mbit/s}]\n        duration: 10 s", "file: nowhere.csv")
    (tmp_path / "scenario.yaml").write_text(text)
    with pytest.raises(InputError, match=r"nowhere\.csv: cannot be read: No such file"):
        read_scenario(tmp_path / "scenario.yaml")


def test_a_missing_scenario_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: there is no such file; check the path"):
        read_scenario(tmp_path / "none.yaml")
