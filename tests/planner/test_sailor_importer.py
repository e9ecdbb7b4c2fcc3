import json
from pathlib import Path
from typing import Any

import pytest

from planner.importers.sailor import KINDS, read_sailor
from planner.profile import ComputeTimes
from traces.errors import InputError

# Fabricated: two layers, two kinds, of which only one was measured with two GPUs to a layer.
TIMES: dict[str, Any] = {
    "toy": {
        "A100-40": {
            "2": {"1": {"0": [0.2, 0.4, 0.1], "1": [2.0, 4.0, 0.1]}},
            "1": {
                "1": {"0": [0.1, 0.2, 0.1], "1": [1.0, 3.0, 0.1]},
                "2": {"0": [0.1, 0.2, 0.1], "1": [1, 2, 0]},
            },
        },
        "GH-96": {"4": {"1": {"0": [0.5, 0.5, 0.1], "1": [1.5, 2.5, 0.1]}}},
    }
}
SIZES: dict[str, Any] = {
    "toy": {
        degree: {
            "0": {"params_floats": 3, "params_bytes": 12, "act_output_bytes": 8, "act_mem_bytes": 16},
            "1": {"params_floats": 5, "params_bytes": 20, "act_output_bytes": 24, "act_mem_bytes": 40},
        }
        for degree in ("1", "2", "4")
    }
}


class Files:
    def __init__(self, folder: Path) -> None:
        self.times, self.sizes = folder / "times.json", folder / "sizes.json"
        self.write(TIMES, SIZES)

    def write(self, times: object, sizes: object) -> None:
        self.times.write_text(json.dumps(times))
        self.sizes.write_text(json.dumps(sizes))

    def error(self, model_name: str = "toy", tensor_parallel: int = 1) -> str:
        with pytest.raises(InputError) as caught:
            read_sailor(self.times, self.sizes, model_name, tensor_parallel=tensor_parallel)
        return str(caught.value).replace(f"{self.times.parent}/", "")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_layers_have_the_sizes_of_the_file(files: Files) -> None:
    model = read_sailor(files.times, files.sizes, "toy")
    sizes = [(layer.parameter_bytes, layer.output_bytes, layer.activation_bytes) for layer in model.layers]
    assert model.name == "toy"
    assert sizes == [(12, 8, 16), (20, 24, 40)]


def test_backward_is_split_in_halves_but_for_the_embedding(files: Files) -> None:
    embedding, block = read_sailor(files.times, files.sizes, "toy").layers
    assert embedding.times["a100-40"].at(1) == ComputeTimes(0.1, 0.0, 0.2)
    assert block.times["a100-40"].at(1) == ComputeTimes(1.0, 1.5, 1.5)


def test_rows_are_in_the_order_of_the_microbatch_size(files: Files) -> None:
    block = read_sailor(files.times, files.sizes, "toy").layers[1]
    assert block.times["a100-40"].samples == (1, 2)
    assert block.times["gh200-96"].samples == (4,)


def test_only_kinds_measured_at_the_degree_appear(files: Files) -> None:
    block = read_sailor(files.times, files.sizes, "toy", tensor_parallel=2).layers[1]
    assert list(block.times) == ["a100-40"]
    assert block.times["a100-40"].samples == (1,)


def test_an_unknown_model_is_refused(files: Files) -> None:
    assert files.error("toi") == "times.json: unknown model 'toi'; did you mean 'toy'? valid: toy"


def test_a_degree_that_was_not_measured_is_refused(files: Files) -> None:
    assert files.error(tensor_parallel=4) == "times.json: toy: unknown tensor parallelism '4'; valid: 1, 2"


def test_a_degree_without_sizes_is_refused(files: Files) -> None:
    assert files.error(tensor_parallel=8) == "sizes.json: toy: unknown tensor parallelism '8'; valid: 1, 2, 4"


def test_an_unknown_gpu_kind_is_refused(files: Files) -> None:
    files.write({"toy": {**TIMES["toy"], "A100-41": {}}}, SIZES)
    assert files.error().startswith("times.json: toy: unknown GPU kind 'A100-41'; did you mean 'A100-40'?")


def test_a_missing_file_is_named(files: Files) -> None:
    files.sizes.unlink()
    assert files.error() == "sizes.json: cannot be read: No such file or directory"


def test_malformed_json_is_named(files: Files) -> None:
    files.times.write_text('{"toy": ')
    assert files.error().startswith("times.json: Invalid JSON: EOF while parsing")


def test_a_wrong_value_is_named_with_its_place(files: Files) -> None:
    files.write({"toy": {"A100-40": {"1": {"1": {"0": [0.1, "fast", 0.1]}}}}}, SIZES)
    assert files.error().startswith("times.json: toy.A100-40.1.1.0.1: Input should be a valid number")


def test_a_negative_time_is_refused(files: Files) -> None:
    files.write({"toy": {"A100-40": {"1": {"1": {"0": [0.1, -0.1, 0.1], "1": [1, 1, 0]}}}}}, SIZES)
    assert files.error().startswith("times.json: toy.A100-40: a time is negative or not finite")


def test_files_that_do_not_belong_together_are_refused(files: Files) -> None:
    files.write({"toy": {"A100-40": {"1": {"1": {"0": [0.1, 0.1, 0.1]}}}}}, SIZES)
    assert files.error().startswith("times.json: toy.A100-40.1: 1 layers, but 2 in the sizes file")


@pytest.mark.parametrize(
    ("model_name", "tensor_parallel", "layers", "kinds"),
    [
        ("OPT-350", 1, 26, set(KINDS.values())),
        ("GPT-Neo-2.7", 1, 34, {"a100-40", "a100-80", "v100-16", "gh200-96"}),
        ("OPT-30", 1, 50, {"a100-40"}),
        ("OPT-30", 4, 50, {"a100-40", "v100-16"}),
        ("LLAMA-3-8", 2, 35, {"a100-40", "gh200-96"}),
    ],
)
def test_the_published_files(
    shared_folder: Path, model_name: str, tensor_parallel: int, layers: int, kinds: set[str]
) -> None:
    sailor = shared_folder / "profiles" / "sailor"
    model = read_sailor(
        sailor / "layer_times.json",
        sailor / "layer_sizes.json",
        model_name,
        tensor_parallel=tensor_parallel,
    )
    assert len(model.layers) == layers
    assert all(set(layer.times) == kinds for layer in model.layers)
    times = model.times(0, layers, "a100-40", 1)
    assert 0 < times.forward_s < times.backward_s
    assert model.parameter_bytes(0, layers) > 1e9
