"""Times of layers from measured rates by shape, launches and memory, in place of a kind's datasheet."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.files.importers.transformer import TransformerShape
from planner.scenario.datasheet import DeviceKind, find_kind
from planner.scenario.kind_table import KindTable, MatrixProduct
from planner.scenario.roofline import (
    ACTIVATION_PASSES,
    SAMPLE_COUNTS,
    LayerWork,
    roofline_layer,
    shard_of,
    sharded_models,
)
from planner.scenario.sharding import named_sharding
from planner.scenario.training import PRECISIONS
from traces.common.errors import InputError

KIND = DeviceKind("made-up", {"fp32": 1e12, "bf16": 4e12}, 2**30, 1e10, "made up")
# A product of 1 GFLOP for each sample.
PRODUCT = MatrixProduct(500, 1000, 1000)
WORK = LayerWork("layer", 1e9, 4_000_000, 2_000_000, 1_000_000, products=(PRODUCT,), kernels=3)


def table_of(
    flop_per_s: float = 1e12, *, launch_s: float = 0.0, memory_bandwidth_bytes_per_s: float = inf
) -> dict[str, KindTable]:
    """A table in which all shapes have the same rate."""
    rates = (((flop_per_s,),),)
    table = KindTable("made-up", "", "fp32", (1,), (1,), (1,), rates, launch_s, memory_bandwidth_bytes_per_s, "")
    return {"made-up": table}


# Rates that rise with each size, by another factor for each.
SHAPED = {
    "made-up": replace(
        table_of()["made-up"],
        rows=(1, 4096),
        inner=(1, 4096),
        outer=(1, 4096),
        rates=tuple(
            tuple(tuple(1e6 * rows * inner * outer for outer in (1.0, 4096.0**0.5)) for inner in (1.0, 4096.0**0.7))
            for rows in (1.0, 4096.0**0.9)
        ),
    )
}


def rate(rows: float, inner: float, outer: float) -> float:
    """Return the FLOP/s of a product in `SHAPED`."""
    one, two, three = (min(each, 4096.0) for each in (rows, inner, outer))
    return 1e6 * one**0.9 * two**0.7 * three**0.5


SHAPE: dict[str, Any] = {
    "vocabulary": st.integers(1, 5000),
    "width": st.sampled_from([8, 96, 1024]),
    "blocks": st.integers(1, 2),
    "heads": st.sampled_from([4, 8]),
    "key_value_heads": st.sampled_from([2, 4]),
    "head_width": st.integers(1, 128),
    "inner": st.integers(1, 4096).map(lambda each: 4 * each),
    "gated": st.booleans(),
    "norm_parameters": st.integers(1, 2),
    "head_norms": st.booleans(),
    "rotary": st.booleans(),
    "positions": st.sampled_from([0, 512]),
    "embedding_width": st.sampled_from([8, 512]),
    "embedding_norm": st.booleans(),
    "head_transform": st.booleans(),
    "window": st.none() | st.integers(1, 600),
}
shapes = st.builds(TransformerShape, **SHAPE) | st.builds(
    TransformerShape, **SHAPE, experts=st.integers(2, 4), active_experts=st.integers(1, 2)
)


@given(shapes, st.integers(1, 512), st.sampled_from(list(PRECISIONS)))
def test_without_a_table_products_and_kernels_change_nothing(
    shape: TransformerShape, tokens: int, precision: str
) -> None:
    kinds = [KIND, find_kind("a100-40")]
    for work in shape.layers(tokens):
        before = replace(work, products=(), kernels=0)
        expected = roofline_layer(before, kinds, precision)
        assert roofline_layer(work, kinds, precision) == expected
        # A table of one kind does not change the other one.
        measured = roofline_layer(work, kinds, precision, table_of())
        assert measured.times["a100-40"] == expected.times["a100-40"]
        assert (measured.activation_bytes, measured.output_bytes) == (expected.activation_bytes, expected.output_bytes)


@given(shapes, st.integers(1, 512), st.sampled_from([1, 2, 4]))
def test_products_of_a_layer_or_shard_are_at_most_its_operations(
    shape: TransformerShape, tokens: int, degree: int
) -> None:
    # A router, and no more, is left out.
    router = 2 * tokens * shape.width * shape.experts if shape.experts > 1 else 0
    for work in shape.layers(tokens):
        part = shard_of(work, degree)
        in_products = sum(each.flop for each in part.products)
        assert in_products <= part.forward_flop * (1 + 1e-9)
        assert in_products >= (part.forward_flop - router) * (1 - 1e-9)
        assert part.kernels >= sum(each.count for each in part.products)


@given(st.integers(1, 2000), st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(SAMPLE_COUNTS))
def test_each_pass_has_the_rates_of_its_own_shapes(rows: int, inner: int, outer: int, samples: int) -> None:
    flop = 2.0 * rows * inner * outer
    work = LayerWork("layer", flop, 4, 0, 0, products=(MatrixProduct(rows, inner, outer),))
    times = roofline_layer(work, [KIND], "fp32", SHAPED).times["made-up"].at(samples)
    many = samples * rows
    assert times.forward_s == pytest.approx(samples * flop / rate(many, inner, outer))
    assert times.backward_input_s == pytest.approx(samples * flop / rate(many, outer, inner))
    assert times.backward_weight_s == pytest.approx(samples * flop / rate(inner, many, outer))


@given(st.sampled_from(["rows", "inner", "outer"]), st.sampled_from([2, 4, 8]))
def test_a_shard_has_the_rates_of_its_part(divide: str, degree: int) -> None:
    whole = MatrixProduct(64, 1024, 2048, divide=divide)
    sharding = named_sharding("row", 4096, 4096, 0)
    work = LayerWork("layer", whole.flop, 4, 0, 0, sharding=sharding, products=(whole,))
    sizes = {"rows": 64, "inner": 1024, "outer": 2048}
    sizes[divide] //= degree
    expected_s = whole.flop / degree / rate(**sizes)
    model = sharded_models("model", [work], [KIND], "fp32", degree, SHAPED)[degree]
    assert model.layers[0].times["made-up"].at(1).forward_s == pytest.approx(expected_s)


def test_kernels_run_one_after_the_other() -> None:
    moved_s = 8 * (2_000_000 + ACTIVATION_PASSES * 1_000_000) / 1e10
    times = roofline_layer(WORK, [KIND], "fp32", table_of(memory_bandwidth_bytes_per_s=1e10)).times["made-up"].at(8)
    assert times.forward_s == times.backward_input_s == pytest.approx(8e-3 + moved_s)
    assert times.backward_weight_s == pytest.approx(8e-3)


def test_no_kernel_takes_less_than_its_launch() -> None:
    times = roofline_layer(WORK, [KIND], "fp32", table_of(launch_s=1.0)).times["made-up"].at(1)
    assert (times.forward_s, times.backward_input_s, times.backward_weight_s) == (3.0, 3.0, 1.0)
    several = replace(WORK, products=(replace(PRODUCT, rows=100, count=5),), kernels=0)
    assert roofline_layer(several, [KIND], "fp32", table_of(launch_s=1.0)).times["made-up"].at(1).forward_s == 5.0


def test_operations_outside_the_products_take_their_rates() -> None:
    work = replace(WORK, forward_flop=3e9, backward_input_flop=0.0, backward_weight_flop=6e9)
    times = roofline_layer(work, [KIND], "fp32", table_of()).times["made-up"].at(2)
    assert (times.forward_s, times.backward_weight_s) == (pytest.approx(6e-3), pytest.approx(12e-3))
    assert times.backward_input_s == 0.0


def test_a_layer_of_unknown_products_keeps_the_datasheet_and_one_of_none_the_table() -> None:
    unknown = replace(WORK, products=())
    assert roofline_layer(unknown, [KIND], "fp32", table_of()) == roofline_layer(unknown, [KIND], "fp32")
    lookup = LayerWork("lookup", 0.0, 4_000_000, 2_000_000, 0, kernels=1)
    times = roofline_layer(lookup, [KIND], "fp32", table_of(memory_bandwidth_bytes_per_s=1e9)).times["made-up"].at(3)
    assert times.forward_s == pytest.approx((4_000_000 + 3 * 2_000_000) / 1e9)


def test_products_of_more_operations_than_the_forward_are_refused() -> None:
    with pytest.raises(InputError, match=r"the products of layer 'layer' have 1e\+09 FLOP a sample, but its forward"):
        replace(WORK, forward_flop=0.9e9)
