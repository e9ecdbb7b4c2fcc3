import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.transport.wire_format import pack, unpack
from planner.cost.network import wire_bytes
from planner.scenario.training import COMPRESSIONS

MOST = torch.finfo(torch.float32).max
TINY = torch.finfo(torch.float32).tiny

compressions = pytest.mark.parametrize("compression", COMPRESSIONS)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def rows(draw: st.DrawFn, numbers: st.SearchStrategy[float] = finite) -> torch.Tensor:
    """Samples x values; zeros, denormals and the largest numbers among them."""
    samples, values = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    drawn = draw(st.lists(numbers, min_size=samples * values, max_size=samples * values))
    return torch.tensor(drawn, dtype=torch.float32).view(samples, values)


def round_trip(compression: str, values: torch.Tensor) -> torch.Tensor:
    return unpack(compression, pack(compression, values, len(values)), len(values)).view_as(values)


@compressions
@given(values=rows())
def test_the_size_is_what_the_planner_says(compression: str, values: torch.Tensor) -> None:
    packed = pack(compression, values, len(values))
    assert packed.dtype == torch.uint8
    assert packed.shape == (wire_bytes(compression, len(values), values.shape[1] * 4, 4),)
    unpacked = unpack(compression, packed, len(values))
    assert unpacked.dtype == torch.float32
    assert unpacked.shape == (values.numel(),)


@given(values=rows(st.floats(width=32)))
def test_without_compression_every_bit_stays(values: torch.Tensor) -> None:
    assert torch.equal(round_trip("none", values).view(torch.int32), values.view(torch.int32))


@given(values=rows(st.floats(-(2.0**127), 2.0**127, width=32)))
def test_bf16_is_off_by_at_most_half_its_last_digit(values: torch.Tensor) -> None:
    found = round_trip("bf16", values)
    # Eight digits; below the normal numbers their spacing stays the same.
    spacing = torch.maximum(values.abs(), torch.tensor(TINY)).double() * 2.0**-8
    assert bool(((found.double() - values.double()).abs() <= spacing).all())
    assert torch.equal(round_trip("bf16", found), found)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1 + 2**-8, 1.0), (1 + 3 * 2**-8, 1 + 2**-6), (1 + 2**-8 + 2**-20, 1 + 2**-7), (-1 - 2**-8, -1.0)],
)
def test_bf16_rounds_ties_to_even(value: float, expected: float) -> None:
    assert round_trip("bf16", torch.tensor([[value]])).item() == expected


@given(values=rows())
def test_int8_is_off_by_at_most_half_a_127th_of_the_largest(values: torch.Tensor) -> None:
    found = round_trip("int8", values).double()
    step = (values.double().abs().amax(dim=1, keepdim=True) / 127).clamp_min(TINY)
    assert bool(((found - values.double()).abs() <= step * (0.5 + 1e-4)).all())
    assert bool((found[values == 0] == 0).all())


@given(values=rows(finite))
def test_int8_keeps_each_sample_by_itself(values: torch.Tensor) -> None:
    together = round_trip("int8", values)
    alone = torch.cat([round_trip("int8", sample.unsqueeze(0)) for sample in values])
    assert torch.equal(together, alone)


@given(numbers=st.lists(st.integers(-127, 127), min_size=1, max_size=20), exponent=st.integers(-60, 60))
def test_int8_keeps_whole_multiples_of_the_scale(numbers: list[int], exponent: int) -> None:
    # With 127 among them, the scale is a power of two, or next to one.
    values = torch.tensor([[127, *numbers]], dtype=torch.float32) * 2.0**exponent
    torch.testing.assert_close(round_trip("int8", values), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@compressions
def test_what_is_not_finite_shows_at_the_other_end(compression: str, bad: float) -> None:
    values = torch.tensor([[1.0, bad, 0.0], [4.0, 0.0, -2.0]])
    found = round_trip(compression, values)
    if compression == "int8":
        # A scale of its own keeps the other sample whole.
        assert bool(found[0].isnan().all())
        torch.testing.assert_close(found[1], values[1], rtol=0, atol=2 / 127)
    else:
        assert torch.equal(found.nan_to_num(7.0), values.nan_to_num(7.0))
        assert found[0, 1].isfinite().item() is False


@compressions
@given(values=rows(st.floats(width=32)))
def test_the_same_values_make_the_same_bytes(compression: str, values: torch.Tensor) -> None:
    assert torch.equal(pack(compression, values, len(values)), pack(compression, values.clone(), len(values)))


@compressions
def test_any_shape_and_layout_is_taken(compression: str) -> None:
    values = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    expected = pack(compression, values.clone(), 3)
    assert torch.equal(pack(compression, values.flatten(), 3), expected)
    spread_out = values.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not spread_out.is_contiguous()
    assert torch.equal(pack(compression, spread_out, 3), expected)


def test_the_largest_number_does_not_overflow() -> None:
    found = round_trip("int8", torch.tensor([[MOST, -MOST, 0.0]]))
    assert bool(found.isfinite().all())
