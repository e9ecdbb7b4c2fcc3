"""Metis' profiles: made-up files of its form."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.files.importers.metis import FORWARD_SHARE, read_metis
from planner.scenario.profile import ModelProfile
from traces.common.errors import InputError

MIB = 2**20
OUTPUT = 1000


def document(times_ms: list[float], memory_mib: list[float], parameters: list[int]) -> dict[str, Any]:
    return {
        "model": {"model_name": "toy", "num_layers": 3, "parameters": {"parameters_per_layer_bytes": parameters}},
        "execution_time": {
            "total_time_ms": 100.0,
            "forward_backward_time_ms": sum(times_ms) + 5.0,
            "optimizer_time_ms": 8.0,
            "layer_compute_total_ms": times_ms,
        },
        "execution_memory": {"total_memory": 1, "layer_memory_total_mb": memory_mib},
    }


PARAMETERS = [100, 200, 100]
FILES = {
    "DeviceType.A100_tp1_bs1.json": document([3.0, 9.0, 6.0], [10, 10, 10], PARAMETERS),
    "DeviceType.A100_tp1_bs4.json": document([4.0, 30.0, 12.0], [10, 13, 16], PARAMETERS),
    # As one of the published samples: a layer's memory is missing.
    "DeviceType.A100_tp1_bs8.json": document([5.0, 50.0, 15.0], [10, 99], PARAMETERS),
    "DeviceType.A100_tp2_bs1.json": document([1.0, 1.0, 1.0], [1, 1, 1], PARAMETERS),
    "DeviceType.T4_tp1_bs2.json": document([30.0, 90.0, 60.0], [10, 10, 10], PARAMETERS),
}


def write(folder: Path, files: dict[str, Any]) -> list[Path]:
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return [folder / name for name in files]


@pytest.fixture
def model(tmp_path: Path) -> ModelProfile:
    return read_metis(write(tmp_path, FILES), OUTPUT, {"A100": "a100-40"})


def test_times_are_shared_among_the_passes(model: ModelProfile) -> None:
    first, middle, last = model.layers
    table = middle.times["a100-40"]
    assert table.samples == (1, 4, 8)
    assert table.forward_s == pytest.approx([0.003, 0.010, 0.050 / 3])
    assert table.backward_input_s == table.backward_weight_s == pytest.approx(table.forward_s)
    assert middle.times["t4"].at(2).total_s == pytest.approx(0.090)
    assert first.times["a100-40"].at(1).backward_input_s == 0
    assert first.times["a100-40"].at(1).total_s == pytest.approx(0.003)
    # What all passes take beyond the layers is the last one's.
    assert last.times["a100-40"].at(1).total_s == pytest.approx(0.006 + 0.005)
    assert last.times["a100-40"].at(1).forward_s == pytest.approx(FORWARD_SHARE * 0.006 + 0.005)


def test_bytes_and_updates(model: ModelProfile) -> None:
    assert model.name == "toy"
    assert [layer.parameter_bytes for layer in model.layers] == PARAMETERS
    assert [layer.output_bytes for layer in model.layers] == [OUTPUT] * 3
    # Memory grows by 0, 3 and 6 MiB in three samples; a layer keeps its output at least.
    assert [layer.activation_bytes for layer in model.layers] == [OUTPUT, MIB, 2 * MIB]
    assert [layer.update_s["a100-40"] for layer in model.layers] == pytest.approx([0.002, 0.004, 0.002])


def changed(**keys: Any) -> dict[str, Any]:
    return json.loads(json.dumps(FILES["DeviceType.A100_tp1_bs1.json"])) | keys


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"profile.json": FILES["DeviceType.A100_tp1_bs1.json"]}, "the file's name does not say what was measured"),
        ({"DeviceType.A100_tp2_bs1.json": changed()}, "no file without tensor parallelism"),
        ({"DeviceType.A100_tp1_bs1.json": "{"}, "Invalid JSON"),
        ({"DeviceType.A100_tp1_bs1.json": "[]"}, "the module planner.files.importers.metis describes the file"),
        ({"DeviceType.A100_tp1_bs1.json": changed(execution_time={})}, "execution_time.layer_compute_total_ms"),
        (
            {"DeviceType.A100_tp1_bs1.json": document([1.0], [1], PARAMETERS)},
            "times of 1 layers do not fit parameters of 3",
        ),
        (
            {"DeviceType.A100_tp1_bs1.json": document([1.0, -1.0, 1.0], [1], PARAMETERS)},
            "execution_time.layer_compute_total_ms.1",
        ),
        (
            {"DeviceType.A100_tp1_bs1.json": document([1.0, 1.0, 1.0], [1, 1, 1e300], PARAMETERS)},
            "execution_memory.layer_memory_total_mb.2",
        ),
        (
            {"DeviceType.A100_tp1_bs1.json": document([1.0, 1.0, 1.0], [1], [1, 1, 10**400])},
            "model.parameters.parameters_per_layer_bytes.2",
        ),
        (
            {
                "DeviceType.A100_tp1_bs1.json": changed(),
                "DeviceType.A100_tp1_bs2.json": document([1.0], [1], [1]),
            },
            "the file has another model than",
        ),
    ],
)
def test_what_is_no_profile_is_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_metis(write(tmp_path, files), OUTPUT, {})
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_batch_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (path,) = write(tmp_path, {"DeviceType.A100_tp1_bs1.json": changed()})
    with pytest.raises(InputError, match="another file has the same kind and batch"):
        read_metis([path, path], OUTPUT, {})
