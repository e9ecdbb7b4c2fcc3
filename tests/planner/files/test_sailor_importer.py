import json
from pathlib import Path
from typing import Any

import pytest

from planner.files.importers.sailor import KINDS, measured_layers, profiled_models, read_sailor, updates_s
from planner.scenario.profile import ComputeTimes
from traces.common.errors import InputError

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

    def error(self, model_name: str = "toy") -> str:
        with pytest.raises(InputError) as caught:
            read_sailor(self.times, self.sizes, model_name)
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


def test_degrees_of_tensor_parallelism_are_shards(files: Files) -> None:
    model = read_sailor(files.times, files.sizes, "toy")
    block = model.at_degree(2).layers[1]
    assert list(model.sharded) == [2]
    assert list(block.times) == ["a100-40"]
    assert block.times["a100-40"].samples == (1,)


def test_fewer_samples_never_take_longer(files: Files) -> None:
    rows = {"1": {"1": {"0": [9, 1, 0], "1": [3, 5, 0]}}, "2": {"1": {"0": [2, 2, 0], "1": [4, 4, 0]}}}
    files.write({"toy": {"A100-40": rows}}, SIZES)
    embedding, block = read_sailor(files.times, files.sizes, "toy").layers
    assert embedding.times["a100-40"].forward_s == (2, 2)
    assert block.times["a100-40"].forward_s == (3, 4)
    assert block.times["a100-40"].at(1).backward_s == 4


def test_the_update_time_is_that_of_all_measured_layers(files: Files) -> None:
    model = read_sailor(files.times, files.sizes, "toy")
    assert [layer.update_s["a100-40"] for layer in model.layers] == pytest.approx([0.1 * 12 / 32, 0.1 * 20 / 32])
    assert model.update_s(0, 2, "a100-40") == pytest.approx(0.1)
    assert model.update_s(0, 2, "v100-16") == 0


def test_copies_of_a_measured_layer_add_their_own_update() -> None:
    row = {0: (1.0, 1.0, 0.6), 1: (2.0, 4.0, 0.6), 2: (2.0, 4.0, 0.6), 3: (2.0, 4.0, 0.6), 4: (3.0, 3.0, 0.6)}
    assert measured_layers(row) == [0, 1, 4]
    assert updates_s({1: row}, {0: 30, 1: 10, 2: 10, 3: 10, 4: 20}) == pytest.approx(
        {0: 0.3, 1: 0.1, 2: 0.1, 3: 0.1, 4: 0.2}
    )


def test_models_are_listed(files: Files) -> None:
    assert profiled_models(files.times) == ["toy"]


def test_an_unknown_model_is_refused(files: Files) -> None:
    assert files.error("toi") == "times.json: unknown model 'toi'; did you mean 'toy'? valid: toy"


def test_a_degree_that_was_not_measured_is_refused(files: Files) -> None:
    model = read_sailor(files.times, files.sizes, "toy")
    with pytest.raises(InputError, match=r"no profile .* 4 devices; profiled degrees.* 1, 2"):
        model.at_degree(4)


def test_sizes_of_whole_layers_are_needed(files: Files) -> None:
    files.write(TIMES, {"toy": {"2": SIZES["toy"]["2"]}})
    assert files.error() == "sizes.json: toy: unknown tensor parallelism '1'; valid: 2"


def test_an_unknown_gpu_kind_is_refused(files: Files) -> None:
    files.write({"toy": {**TIMES["toy"], "A100-41": {}}}, SIZES)
    assert files.error().startswith("times.json: toy: unknown GPU kind 'A100-41'; did you mean 'A100-40'?")


def test_a_missing_file_is_named(files: Files) -> None:
    files.sizes.unlink()
    assert files.error() == "sizes.json: the file cannot be read: No such file or directory; check the path"


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
    assert files.error().startswith("times.json: toy.A100-40.1: the file has 1 layers, but the sizes file has 2")


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
    model = read_sailor(sailor / "layer_times.json", sailor / "layer_sizes.json", model_name).at_degree(tensor_parallel)
    assert len(model.layers) == layers
    assert all(set(layer.times) == kinds for layer in model.layers)
    times = model.times(0, layers, "a100-40", 1)
    assert 0 < times.forward_s < times.backward_s
    assert model.parameter_bytes(0, layers) > 1e9


@pytest.mark.parametrize(("kind", "bytes_per_s"), [("v100-16", 752e9), ("a100-40", 1245e9)])
def test_updates_of_all_published_models_move_bytes_at_one_rate(
    shared_folder: Path, kind: str, bytes_per_s: float
) -> None:
    sailor = shared_folder / "profiles" / "sailor"
    for name in ("OPT-350", "GPT-Neo-2.7", "OPT-30"):
        model = read_sailor(sailor / "layer_times.json", sailor / "layer_sizes.json", name)
        degree = 1 if model.layers[0].update_s.get(kind) else 4
        shard = model.at_degree(degree)
        moved_bytes = 7 * shard.parameter_bytes(0, len(shard.layers))
        assert moved_bytes / shard.update_s(0, len(shard.layers), kind) == pytest.approx(bytes_per_s, rel=0.01)
