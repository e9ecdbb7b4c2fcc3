"""`ropebridge profile kind`: a measured table of this device, named in a scenario; and what is refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from executor.profiling.kind_rates import grid_for
from planner.files.cluster import read_kind_table
from planner.files.scenario import read_scenario
from planner.scenario.datasheet import DeviceKind
from planner.scenario.kind_table import KindTable, MatrixProduct
from planner.scenario.profile import MeasuredRates, ModelProfile
from planner.scenario.roofline import LayerWork, roofline_layer
from tests.helpers.processes.command import ropebridge

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
SCENARIO: dict[str, Any] = {
    "name": "measured",
    "cluster": {
        "kinds": {"box": {"peak": "1 TFLOP/s", "memory": "4 GiB", "memory_bandwidth": "20 GB/s"}},
        "hosts": [
            {"name": f"host-{name}", "kind": "box", "region": name, "devices": 2, "interconnect": "8 GB/s"}
            for name in ("east", "west")
        ],
        "links": [{"between": ["east", "west"], "bandwidth": "1 Gbit/s", "latency": "1 ms"}],
    },
    "model": {"name": "small", "huggingface": "config.json", "tokens": 64, "roofline": ["box.yaml"]},
    "training": {"global_batch": 8, "microbatch": 2},
}
TABLE: dict[str, Any] = {
    "kind": "box",
    "device": "CPU",
    "precision": "fp32",
    "source": "made up",
    "launch": "10 us",
    "memory_bandwidth": "20 GB/s",
    "rows": [1, 256],
    "inner": [64],
    "outer": [64, 1024],
    "rates": [[["1 GFLOP/s", "2 GFLOP/s"]], [["10 GFLOP/s", "50 GFLOP/s"]]],
}

MEASURE = ["profile", "kind", "--kind", "box", "--threads", "1", "--limit", "0.1 s"]


@pytest.fixture(autouse=True, scope="module")
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(SCENARIO))
    (tmp_path / "box.yaml").write_text(yaml.safe_dump(TABLE))
    return tmp_path


def test_a_measured_table_is_used_by_plans_and_simulations(folder: Path) -> None:
    (folder / "box.yaml").unlink()
    done = ropebridge(*MEASURE, "-o", "box.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0] == "kernel launches and memory"
    assert "written to box.yaml: name it in 'roofline:' of a model" in done.stdout
    table = read_kind_table(folder / "box.yaml")
    assert (table.kind, table.precision) == ("box", "fp32")
    assert table.source.startswith("ropebridge profile kind: ")
    assert ", 1 threads, torch " in table.source
    assert table.launch_s > 0
    layers = read_scenario(folder / "scenario.yaml").model.layers
    # The pass over a block takes at least the launches of its kernels.
    assert layers[1].times["box"].at(1).forward_s > 41 * read_kind_table(folder / "box.yaml").launch_s
    planned = ropebridge("plan", "scenario.yaml", "--strategy", "megatron", "--explain", "-o", "plan.json", cwd=folder)
    assert planned.returncode == 0, planned.stderr
    simulated = ropebridge("simulate", "scenario.yaml", "--plan", "plan.json", "--steps", "2", cwd=folder)
    assert simulated.returncode == 0, simulated.stderr


def test_an_explanation_names_the_table_and_the_layers_outside_its_sizes(folder: Path) -> None:
    def explained(table: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        (folder / "box.yaml").write_text(yaml.safe_dump(table))
        command = ["plan", "scenario.yaml", "--strategy", "megatron", "--explain"]
        said, as_json = ropebridge(*command, cwd=folder), ropebridge(*command, "--json", cwd=folder)
        assert (said.returncode, as_json.returncode) == (0, 0)
        (line,) = (line for line in said.stdout.splitlines() if line.startswith("rates of"))
        (rates,) = json.loads(as_json.stdout)["explanation"]["rates"]
        return line, rates

    line, rates = explained(TABLE)
    # Of the measured products none is wider than 64 numbers inside, as the second matrix of each MLP is; the embedding
    # has no product.
    assert line == (
        "rates of box, layers 0 to 5: measured, box.yaml: made up; "
        "outside the measured sizes, at the nearest rates: layers 1 to 5"
    )
    assert rates == {
        "kind": "box",
        "source": "box.yaml: made up",
        "layers": [0, 1, 2, 3, 4, 5],
        "outside": [1, 2, 3, 4, 5],
    }
    sizes = [1, 100_000]
    square = [["1 GFLOP/s", "1 GFLOP/s"]] * 2
    line, rates = explained({**TABLE, "rows": sizes, "inner": sizes, "outer": sizes, "rates": [square] * 2})
    assert line.endswith("layers 0 to 5: measured, box.yaml: made up; all products have measured sizes")
    assert rates["outside"] == []


_SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True).map(sorted).map(tuple)


@given(
    axes=st.tuples(_SIZES, _SIZES, _SIZES),
    shapes=st.lists(st.tuples(*[st.integers(1, 64)] * 3), min_size=1, max_size=3),
    has_input_gradient=st.booleans(),
    parameter_bytes=st.sampled_from([0, 8]),
)
def test_microbatches_within_the_measured_sizes(
    axes: tuple[tuple[int, ...], ...],
    shapes: list[tuple[int, int, int]],
    has_input_gradient: bool,
    parameter_bytes: int,
) -> None:
    """By definition: all products of all passes lie between the first and the last measured size of each axis."""
    rates = (((1.0,) * len(axes[2]),) * len(axes[1]),) * len(axes[0])
    table = KindTable("box", "CPU", "fp32", *axes, rates, 1e-6, 1e9, "made up")
    products = tuple(MatrixProduct(*shape) for shape in shapes)
    flop = sum(each.flop for each in products)
    gradient = None if has_input_gradient else 0.0
    work = LayerWork("layer", flop, parameter_bytes, 4, 4, backward_input_flop=gradient, products=products)
    kind = DeviceKind("box", {"fp32": 1e12}, 2**30, 1e9, "made up")
    found = roofline_layer(work, [kind], "fp32", {"box": table}).times["box"].rates
    assert found is not None
    for samples in range(1, 70):
        used = []
        for rows, inner, outer in ((samples * rows, inner, outer) for rows, inner, outer in shapes):
            used.append((rows, inner, outer))
            used += [(rows, outer, inner)] if has_input_gradient else []
            used += [(inner, rows, outer)] if parameter_bytes else []
        inside = all(axis[0] <= size <= axis[-1] for each in used for axis, size in zip(axes, each, strict=True))
        assert found.cover(samples) == inside


def test_layers_with_operations_but_no_products_use_no_table() -> None:
    table = KindTable("box", "CPU", "fp32", (1,), (1,), (1,), (((1.0,),),), 1e-6, 1e9, "made up")
    kind = DeviceKind("box", {"fp32": 1e12}, 2**30, 1e9, "made up")
    for flop, expected in ((10.0, None), (0.0, MeasuredRates("made up"))):
        layer = roofline_layer(LayerWork("layer", flop, 4, 4, 4), [kind], "fp32", {"box": table})
        assert layer.times["box"].rates == expected


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_measurement_replaces_a_table_and_prints_it_as_json(suffix: str, folder: Path) -> None:
    file = folder / f"new.{suffix}"
    for precision in ("fp32", "bf16"):
        done = ropebridge(*MEASURE, "--precision", precision, "--json", "-o", file.name, cwd=folder)
        assert done.returncode == 0, done.stderr
        table = read_kind_table(file)
        assert table.precision == precision
        assert json.loads(done.stdout) == {"file": file.name, **json.loads(json.dumps(asdict(table)))}


def test_a_table_is_named_in_a_model_file_and_stays_when_it_is_imported_again(folder: Path) -> None:
    def read(model: object) -> ModelProfile:
        scenario = {**SCENARIO, "model": model, "training": {"global_batch": 8, "precision": "bf16"}}
        (folder / "scenario.yaml").write_text(yaml.safe_dump(scenario))
        return read_scenario(folder / "scenario.yaml").model

    (folder / "box.yaml").write_text(yaml.safe_dump({**TABLE, "precision": "bf16"}))
    direct = read(SCENARIO["model"])
    command = ["profile", "import", "huggingface", "config.json", "--tokens", "64", "--name", "small", "-o", "m.yaml"]
    assert ropebridge(*command, cwd=folder).returncode == 0
    written = yaml.safe_load((folder / "m.yaml").read_text())
    (folder / "m.yaml").write_text(yaml.safe_dump({**written, "roofline": ["box.yaml"]}))
    for _ in range(2):
        of_file = read("m.yaml")
        for made, expected in ((of_file, direct), (of_file.sharded[2], direct.sharded[2])):
            # Equal layers are numbered from 0 in a file, and from their place in the model of a config.json.
            assert made.layers == tuple(
                replace(layer, name=own.name) for layer, own in zip(expected.layers, made.layers, strict=True)
            )
        assert ropebridge(*command, cwd=folder).returncode == 0


Change = Callable[[dict[str, Any]], object]
BAD_TABLES: dict[str, tuple[Change, list[str]]] = {
    "unknown key": (lambda table: table.update(rate=1), ["box.yaml:", "rate", "did you mean 'rates'"]),
    "missing key": (lambda table: table.pop("launch"), ["box.yaml", "'launch' is missing"]),
    "no unit": (lambda table: table.update(launch="10"), ["box.yaml:", "launch", "has no unit"]),
    "unknown precision": (lambda table: table.update(precision="fp4"), ["box.yaml:", "precision", "'fp4'", "bf16"]),
    "another precision": (
        lambda table: table.update(precision="bf16"),
        ["scenario.yaml", "model.roofline[0]", "'box' is for bf16, but the model is trained in fp32"],
    ),
    "no rates": (lambda table: table.update(rates=[]), ["box.yaml:", "rates", "2 x 1 x 2 rates"]),
    "a missing rate": (lambda table: table["rates"][1][0].pop(), ["box.yaml:", "rates", "2 x 1 x 2 rates"]),
    "a rate of zero": (
        lambda table: table["rates"][1][0].__setitem__(1, "0 GFLOP/s"),
        ["box.yaml:", "rates[1][0][1]", "above zero"],
    ),
    "falling sizes": (lambda table: table.update(rows=[256, 1]), ["box.yaml:", "rows", "[256, 1] are no rising sizes"]),
    "no sizes": (lambda table: table.update(inner=[]), ["box.yaml:", "inner"]),
    "another kind": (
        lambda table: table.update(kind="bag"),
        ["scenario.yaml", "model.roofline", "no device of the cluster", "bag", "box"],
    ),
}


def refused(folder: Path, *arguments: object) -> str:
    """Return the only line of the error; nothing is printed or written."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = ropebridge(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return done.stderr


@pytest.mark.parametrize("mistake", BAD_TABLES)
def test_a_table_with_a_mistake_is_refused(mistake: str, folder: Path) -> None:
    change, expected = BAD_TABLES[mistake]
    table = json.loads(json.dumps(TABLE))
    change(table)
    (folder / "box.yaml").write_text(yaml.safe_dump(table))
    message = refused(folder, "plan", "scenario.yaml", "--strategy", "megatron", "-o", "plan.json")
    for text in expected:
        assert text in message


BLOCK = {"name": "a", "parameters": "1 MB", "output": "1 kB", "activation": "1 kB", "forward": "1 MFLOP"}
TIMES = {"samples": [1], "forward": ["1 ms"], "backward_input": ["1 ms"], "backward_weight": ["1 ms"]}
MEASURED = {**{key: value for key, value in BLOCK.items() if key != "forward"}, "times": {"box": TIMES}}
PRODUCT = {"rows": 10, "inner": 20, "outer": 30}
BAD_MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no such table": (
        {"huggingface": "config.json", "tokens": 64, "roofline": ["bx.yaml"]},
        ["bx.yaml", "no such file"],
    ),
    "two tables": (
        {"huggingface": "config.json", "tokens": 64, "roofline": ["box.yaml", "box.yaml"]},
        ["model.roofline[1]", "two tables of the kind 'box'", "one for each kind"],
    ),
    "measured times": (
        {"layers": [MEASURED], "roofline": ["box.yaml"]},
        ["model.roofline", "times are measured, so that no roofline is used"],
    ),
    "products of measured times": (
        {"layers": [{**MEASURED, "products": [PRODUCT]}]},
        ["model.layers[0]", "products", "no use"],
    ),
    "kernels of measured times": ({"layers": [{**MEASURED, "kernels": 3}]}, ["model.layers[0]", "kernels", "no use"]),
    "too many operations": (
        {"layers": [{**BLOCK, "products": [{**PRODUCT, "count": 100}]}]},
        ["model.layers[0]", "products", "1.2e+06 FLOP a sample, but its forward has 1e+06"],
    ),
    "unknown division": (
        {"layers": [{**BLOCK, "products": [{**PRODUCT, "divide": "iner"}]}]},
        ["model.layers[0]", "products", "'iner'", "did you mean 'inner'"],
    ),
    "no rows": ({"layers": [{**BLOCK, "products": [{**PRODUCT, "rows": 0}]}]}, ["products[0].rows", "greater than 0"]),
}


@pytest.mark.parametrize("mistake", BAD_MODELS)
def test_a_model_with_a_mistake_is_refused(mistake: str, folder: Path) -> None:
    model, expected = BAD_MODELS[mistake]
    (folder / "scenario.yaml").write_text(yaml.safe_dump({**SCENARIO, "model": {"name": "small", **model}}))
    message = refused(folder, "plan", "scenario.yaml", "--strategy", "megatron", "-o", "plan.json")
    for text in expected:
        assert text in message


BAD_OPTIONS: dict[str, tuple[list[str], list[str]]] = {
    "no unit": (["--limit", "5", "-o", "new.yaml"], ["'5'", "unit"]),
    "no time": (["--limit", "0 s", "-o", "new.yaml"], ["--limit", "no time", "'2 min'"]),
    "unknown precision": (["--precision", "fp4", "-o", "new.yaml"], ["--precision", "'fp4'"]),
    "no training in it": (["--precision", "fp8", "-o", "new.yaml"], ["--precision", "fp8"]),
    "another file": (["-o", "config.json"], ["config.json", "something else than a table", "choose another file"]),
    "no folder": (["-o", "nowhere/new.yaml"], ["nowhere", "does not exist"]),
    "no such kind here": (["--kind", "a100-40", "--limit", "1 s", "-o", "new.yaml"], ["--kind", "'a100-40'"]),
}


@pytest.mark.parametrize("mistake", BAD_OPTIONS)
def test_options_with_a_mistake_are_refused(mistake: str, folder: Path) -> None:
    options, expected = BAD_OPTIONS[mistake]
    message = refused(folder, "profile", "kind", *options)
    for text in expected:
        assert text in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_none_is_measured(folder: Path) -> None:
    assert "torch finds no GPU here" in refused(folder, "profile", "kind", "--device", "cuda", "-o", "new.yaml")


@given(st.floats(1e8, 1e15), st.lists(st.floats(0.01, 1000), min_size=2, max_size=4))
@example(100709577951.0, [17.0, 18.0])
def test_a_grid_fits_its_time_and_grows_with_it(flop_per_s: float, limits_s: list[float]) -> None:
    grids = [grid_for(flop_per_s, limit_s) for limit_s in sorted(limits_s)]
    for grid, limit_s in zip(grids, sorted(limits_s), strict=True):
        assert grid.planned_s(flop_per_s) <= limit_s or min(len(grid.rows), len(grid.widths)) == 2
    for one, other in pairwise(grids):
        reaches_as_far = one.widths[-1] <= other.widths[-1] or one.rows[-1] <= other.rows[-1]
        # Where the time allows a finer grid at all, that is taken, and may reach less far.
        assert reaches_as_far or other.widths[1] / other.widths[0] < one.widths[1] / one.widths[0]
