"""`ropebridge profile model` on this machine's CPU."""

import json
import os
import pty
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from executor.profiling.background_load import LoadConfig, background_load
from executor.profiling.layer_memory import SavedBytes, layer_memory, peak_on_cpu, saved_bytes, stage_peak_bytes
from executor.profiling.layer_times import measure_layers
from executor.profiling.model_profile import count_work
from executor.training.models.loading import LayerSize, LoadedModel, SampleShape, load_with_sizes
from executor.training.models.precision import boundary_dtype
from executor.training.stage_module import StageModule
from planner.files.importers.transformer import TransformerShape
from planner.files.scenario import read_scenario
from planner.scenario.profile import Workspace
from planner.scenario.scenario import ModelCode
from planner.scenario.training import Training
from tests.helpers.processes.command import ropebridge
from traces.common.errors import InputError, RunError

MODELS = Path(__file__).parents[3] / "experiments" / "models"
ARGUMENTS = {"vocabulary": 32, "width": 32, "heads": 2, "blocks": 2, "length": 16}
OPTIONS = [each for key, value in ARGUMENTS.items() for each in ("--set", f"{key}={value}")]
QUICK = ["--samples", "1,3", "--repeats", "1"]
CPU = torch.device("cpu")

SCENARIO = """
name: profiled
model: {model}
cluster:
  devices:
    - {{name: one, kind: one-box, region: here}}
    - {{name: two, kind: other-box, region: here}}
  kinds: {{one-box: &box {{peak: 1 TFLOP/s, memory: 1 GiB, memory_bandwidth: 10 GB/s}}, other-box: *box}}
  links:
    - {{from: here, to: here, bandwidth: 1 Gbit/s, latency: 1 ms}}
training: {{global_batch: 4}}
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_profile_of_two_kinds_is_the_model_of_a_scenario(tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    ways = {"one-box": ["--ranks", "2", "--optimizer", "adamw"], "other-box": ["--split", "--json"]}
    for kind, options in ways.items():
        done = ropebridge("profile", "model", MODELS / "gpt.py", *OPTIONS, *QUICK, "--kind", kind, *options, "-o", file)
        assert done.returncode == 0, done.stderr
        told = ["memory", "warming up", *(f"round {number} of 6" for number in range(1, 7))]
        assert done.stderr.splitlines() == told
        if "--json" not in options:
            assert "name it as 'model:' of a scenario" in done.stdout
            assert "launch overhead: " in done.stdout
    check_document(json.loads(done.stdout))
    written = yaml.safe_load(file.read_text())
    assert written["precision"] == "fp32"
    assert {kind: text.split(", ")[1] for kind, text in written["measured_on"].items()} == {
        "one-box": f"{max(1, len(os.sched_getaffinity(0)) // 2)} threads",
        "other-box": f"{len(os.sched_getaffinity(0))} threads",
    }

    (tmp_path / "scenario.yaml").write_text(SCENARIO.format(model=file))
    scenario = read_scenario(tmp_path / "scenario.yaml")
    sizes = load_with_sizes(ModelCode(MODELS / "gpt.py", ARGUMENTS), seed=0).sizes
    assert [layer.parameter_bytes for layer in scenario.model.layers] == [size.parameter_bytes for size in sizes]
    assert [layer.output_bytes for layer in scenario.model.layers] == [size.output.size_bytes for size in sizes]
    assert all(layer.activation_bytes > 0 for layer in scenario.model.layers)
    for layer in scenario.model.layers:
        assert layer.times.keys() == layer.update_s.keys() == set(ways)
        assert all(table.samples == (1, 3) and min(table.forward_s) > 0 for table in layer.times.values())
        assert min(layer.update_s.values()) > 0
    assert scenario.code is not None
    assert scenario.code.path == MODELS / "gpt.py"
    planned = ropebridge("simulate", tmp_path / "scenario.yaml", "--strategy=megatron", "--steps", "2")
    assert planned.returncode == 0, planned.stderr


def check_document(document: dict[str, object]) -> None:
    layers = document["layers"]
    assert isinstance(layers, list)
    times = [time for layer in layers for sizes in layer["times"].values() for time in sizes.values()]
    assert len(times) == 4 * 2 * 5
    assert all(time["least"] <= time["median"] <= time["most"] for time in times)
    assert any(time["least"] < time["most"] for time in times)
    assert all(layer["peak_bytes"] > 0 for layer in layers)
    assert isinstance(document["peak_bytes"], int)
    assert document["peak_bytes"] > max(layer["peak_bytes"] for layer in layers)
    assert document["launch_overhead_s"] > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "4,2"], "--samples: '4,2' is no list of rising numbers; give rising whole"),
        (["--set", "width"], "--set: 'width' is no assignment; write KEY=VALUE"),
        (["--set", "width=["], "--set: 'width=[' is no assignment; write KEY=VALUE"),
        (["--optimizer", "adam"], "unknown optimizer 'adam'"),
        (["--kind", "a100-40"], "--kind: what is measured here is no 'a100-40': torch computes on "),
        (["--precision", "fp16"], "--precision: training in fp16 cannot be run yet; choose among fp32, tf32, bf16"),
        (["--ranks", "2", "--device", "cuda"], "only ranks on a CPU share their device"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    done = ropebridge("profile", "model", MODELS / "gpt.py", *OPTIONS, *options, "-o", tmp_path / "gpt.yaml")
    assert_refused(done, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, "there is no such file"),
        ("model.py", "layers = []", "the model file has no function 'build'"),
    ],
)
def test_files_that_are_no_model(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    done = ropebridge("profile", "model", tmp_path / name, "-o", tmp_path / "model.yaml")
    assert_refused(done, message)
    assert not (tmp_path / "model.yaml").exists()


SLEEPING = """
import time
import torch
from torch import nn

passes = 0

class Sleeping(nn.Linear):
    def forward(self, x):
        global passes
        passes += 1
        time.sleep(SECONDS)
        return super().forward(x)

class Model:
    layers = [Sleeping(4, 4)]
    loss = staticmethod(nn.functional.cross_entropy)

    def samples(self, first, count):
        return torch.ones(count, 4), torch.zeros(count, dtype=torch.long)

def build():
    return Model()
"""


@pytest.mark.parametrize(
    ("seconds", "steady"), [pytest.param("0.1", True, marks=pytest.mark.slow), ("1e-5 * min(passes, 100) ** 2", False)]
)
def test_rounds_that_differ_much_are_reported(seconds: str, steady: bool, tmp_path: Path) -> None:
    (tmp_path / "sleeping.py").write_text(SLEEPING.replace("SECONDS", seconds))
    command = ["profile", "model", "sleeping.py", "--samples", "1", "--repeats", "1", "-o", "sleeping.yaml"]
    done = ropebridge(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("not steady: all layers take" not in done.stdout) == steady, done.stdout


def test_the_file_of_another_model_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    file.write_text("name: other\nlayers: []\n")
    done = ropebridge("profile", "model", MODELS / "gpt.py", *OPTIONS, *QUICK, "-o", file)
    assert_refused(done, "there is another model in this file")
    assert file.read_text() == "name: other\nlayers: []\n"


def test_a_file_of_another_precision_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    command = ["profile", "model", MODELS / "gpt.py", *OPTIONS, "--samples", "1", "--repeats", "1", "-o", file]
    assert ropebridge(*command).returncode == 0
    # As files were before they stated their precision.
    file.write_text(file.read_text().replace("precision: fp32\n", ""))
    before = file.read_text()
    assert_refused(ropebridge(*command, "--precision", "bf16"), "were measured in fp32, but the new ones are of bf16")
    assert file.read_text() == before
    assert ropebridge(*command, "--kind", "other-box").returncode == 0
    assert yaml.safe_load(file.read_text())["precision"] == "fp32"


def assert_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


PROGRESS = """
import sys
from experiments.runs.progress import showing_rounds
with showing_rounds(3, lambda line: print("told", line, file=sys.stderr)) as begin:
    for line in ("warming up", "round 1", "round 1"):
        begin(line)
"""


def test_a_bar_in_a_terminal_and_lines_elsewhere() -> None:
    command = [sys.executable, "-c", PROGRESS]
    piped = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (piped.stdout, piped.stderr) == ("", "told warming up\ntold round 1\n")
    ours, theirs = pty.openpty()
    shown = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, check=True, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    drawn = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert shown.stdout == b""
    assert "told" not in drawn
    # The last line of the bar is whole: no part of it is in the colour of what is left.
    assert "warming up" in drawn
    assert "━" * 40 in drawn


def test_what_a_layer_keeps_is_what_autograd_saves() -> None:
    """A linear layer keeps its inputs, 4 bytes a number; the outputs that ReLU keeps are inputs of the next layer."""
    layer, shape = nn.Sequential(nn.Linear(6, 5), nn.ReLU()), SampleShape((6,), torch.float32)

    def refuse(_: int) -> torch.Tensor:
        raise InputError("the layer is not the first one")

    assert saved_bytes(layer, shape, refuse) == SavedBytes(0, 4 * 6, 4 * 5)
    within = nn.Sequential(layer, nn.Linear(5, 2))
    assert saved_bytes(within, shape, refuse) == SavedBytes(4 * 5, 4 * 6, 0)


class Linear:
    """Two layers of 8 numbers without biases."""

    size = 4

    def __init__(self) -> None:
        self.layers = [nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * targets).sum()

    def select(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(indices), 8), torch.ones(len(indices), 8)


LINEAR = LoadedModel(Linear(), (LayerSize(256, SampleShape((8,), torch.float32)),) * 2, Linear())


def test_the_peak_of_a_linear_layer() -> None:
    """Its data, and first what it puts out and then the gradient of that; targets are gone after the forward."""
    samples = 100
    row = 4 * 8 * samples
    peak_bytes = stage_peak_bytes(LINEAR, [0], samples, Training(samples), CPU)
    # Inputs and targets, the numbers of the samples, and the outputs.
    assert 3 * row <= peak_bytes <= 4 * row + 256


def test_a_split_linear_layer_defers_its_inputs_and_the_gradient_of_its_outputs() -> None:
    """Each has 8 float32 numbers; the weight gradient, 8 x 8 numbers, is all that its pass makes."""
    memory = layer_memory(LINEAR, 1, SavedBytes(0, 4 * 8, 0), Training(16), CPU)
    assert memory.split is not None
    assert (memory.split.deferred_bytes, memory.split.weight) == (2 * 4 * 8, Workspace(4 * 8 * 8, 0))


def test_the_weight_pass_holds_one_weight_gradient_at_a_time() -> None:
    layers = (nn.Linear(64, 64, bias=False) for _ in range(3))
    module = StageModule(list(layers), CPU, "fp32", copies_inputs=False)
    module.start_step(recompute=False, splits=True)

    def train_input() -> None:
        module.forward(0, torch.ones(1, 64))
        module.backward_input(0, torch.ones(1, 64))

    train_input()
    module.backward_weight(0)
    assert peak_on_cpu(lambda: module.backward_weight(0), after=train_input) <= 4 * 64 * 64 + 3 * 2 * 4 * 64


def test_measuring_leaves_the_parameters_as_they_are() -> None:
    before = [layer.weight.clone() for layer in LINEAR.model.layers]  # type: ignore[union-attr]
    (first, last) = measure_layers(LINEAR, [0, 1], 4, Training(4), repeats=2)
    assert (first.layer, last.layer) == (0, 1)
    assert min(first.forward_s, last.backward_s, first.backward_weight_s, last.update_s) > 0
    after = [layer.weight for layer in LINEAR.model.layers]  # type: ignore[union-attr]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(layer.weight.grad is None for layer in LINEAR.model.layers)  # type: ignore[union-attr]


class Watched(nn.Linear):
    """A layer that keeps how torch would compute float32 numbers on a GPU."""

    def __init__(self) -> None:
        super().__init__(8, 8, bias=False)
        self.found: set[tuple[bool, bool]] = set()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.found.add((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return super().forward(input)


@pytest.mark.parametrize("precision", ["tf32", "fp32", "bf16"])
def test_layers_are_measured_in_the_arithmetic_of_the_precision(precision: str) -> None:
    watched = Watched()
    model = Linear()
    model.layers = [watched, nn.Linear(8, 8, bias=False)]
    sizes = (LayerSize(256, SampleShape((8,), boundary_dtype(precision))), LINEAR.sizes[1])
    training = Training(4, precision=precision)
    loaded = LoadedModel(model, sizes, model)
    stage_peak_bytes(loaded, [0, 1], 4, training, CPU)
    measure_layers(loaded, [0, 1], 4, training, repeats=1)
    assert watched.found == {(precision == "tf32", precision == "tf32")}


def test_counted_work_is_that_of_the_formulas() -> None:
    """Two ways to the same bytes and operations: the example GPT on the meta device, and a shape's arithmetic."""
    code = ModelCode(MODELS / "gpt.py", {"vocabulary": 48, "width": 32, "heads": 4, "blocks": 2, "length": 16})
    shape = TransformerShape(
        vocabulary=48,
        width=32,
        blocks=2,
        heads=4,
        key_value_heads=4,
        head_width=8,
        inner=128,
        embedding_width=32,
        positions=16,
        head_bias=True,
        tied=False,
    )
    counted = count_work(load_with_sizes(code, seed=0), code, Training(1))
    amounts = [
        [(each.forward_flop, each.parameter_bytes, each.output_bytes, each.activation_bytes) for each in layers]
        for layers in (counted, shape.layers(16))
    ]
    assert amounts[0] == amounts[1]
    # Queries, keys and values may be one product or three.
    columns: list[list[Counter[tuple[float, float]]]] = [[], []]
    for found, layers in zip(columns, (counted, shape.layers(16)), strict=True):
        for each in layers:
            found.append(Counter())
            for product in each.products:
                found[-1][product.rows, product.inner] += round(product.outer) * product.count
    assert columns[0] == columns[1]


def children() -> set[str]:
    """Processes that this one has started, those of other tests among them."""
    listed = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True, check=False)
    return set(listed.stdout.split())


@pytest.mark.slow
def test_companions_compute_until_the_measurement_is_over(tmp_path: Path) -> None:
    orders = LoadConfig(str(MODELS / "gpt.py"), dict(ARGUMENTS), [1], "sgd", "fp32", threads=1)
    before = children()
    with background_load(1, orders):
        ours = children() - before
        assert ours
    assert not children() & ours
    missing = LoadConfig(str(tmp_path / "missing.py"), {}, [1], "sgd", "fp32", threads=1)
    ended = pytest.raises(RunError, match="a background process of the measurement has ended before it was ready")
    with ended, background_load(1, missing):
        pass
