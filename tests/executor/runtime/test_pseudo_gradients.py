"""Pseudo-gradients in few bits or with few values: sizes, errors, and that nothing is lost by error feedback."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from executor.runtime.outer.pseudo_gradients import pack_layer, unpack_layer
from executor.runtime.outer.state import OuterState
from executor.training.flat_state import FlatParameters
from planner.plan.outer_step import OUTER_COMPRESSIONS, OuterStep, part_of

# Largest error of a format, as a share of the largest absolute value.
ERRORS = {"none": 0.0, "bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}

SETTINGS = st.builds(
    OuterStep, compression=st.sampled_from(OUTER_COMPRESSIONS), density=st.sampled_from([1.0, 0.5, 0.02, 1e-6])
)


def drawn(elements: int, seed: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


@given(SETTINGS, st.one_of(st.integers(0, 600), st.sampled_from([4096, 4097, 9000])), st.integers(0, 9))
def test_values_come_back_within_the_error_of_their_format(settings: OuterStep, elements: int, seed: int) -> None:
    values = drawn(elements, seed)
    packed = pack_layer(settings, values)
    assert packed.numel() == settings.packed_bytes(elements)
    found = unpack_layer(settings, packed, elements)
    assert found.shape == values.shape
    if not elements:
        return
    count, width, kept = settings.chunks(elements)
    assert (count - 1) * width < elements <= count * width
    # What each chunk keeps, by sorting.
    expected = values.clone()
    for first in range(0, elements, width):
        chunk = expected[first : first + width]
        small = sorted(range(len(chunk)), key=lambda index: float(chunk[index].abs()), reverse=True)[kept:]
        chunk[small] = 0
    error = (found - expected).abs().max() / values.abs().max()
    assert error <= ERRORS[settings.compression] * (1 + 1e-5)


@given(SETTINGS, st.integers(1, 5000))
def test_smaller_formats_take_fewer_bytes(settings: OuterStep, elements: int) -> None:
    sizes = [replace(settings, compression=each).packed_bytes(elements) for each in ("none", "bf16")]
    assert sizes[1] < sizes[0]
    if elements >= 1000:
        dense = [OuterStep(compression=each).packed_bytes(elements) for each in OUTER_COMPRESSIONS]
        assert dense == sorted(dense, reverse=True)
        assert dense[3] < elements * 4 / 7


@pytest.mark.parametrize("compression", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_seen_by_others(compression: str, wrong: float) -> None:
    for density in (1.0, 0.1):
        settings = OuterStep(compression=compression, density=density)
        values = drawn(500, 0)
        values[7] = wrong
        assert not unpack_layer(settings, pack_layer(settings, values), 500).isfinite().all()


@given(st.lists(SETTINGS, min_size=1, max_size=6))
def test_error_feedback_loses_nothing(exchanges: list[OuterStep]) -> None:
    """What was sent so far, by any settings, and what is left out, is the sum of all pseudo-gradients."""
    layer = nn.Linear(30, 20)
    parameters = FlatParameters([layer])
    begun = parameters.parameters()
    state = OuterState(exchanges[0], lambda index: parameters, [0], {})
    sent, wanted = torch.zeros_like(begun), torch.zeros_like(begun)
    for number, settings in enumerate(exchanges):
        state.use(settings)
        parameters.put_parameters(begun - drawn(begun.numel(), number))
        wanted += begun - parameters.parameters()
        sent += unpack_layer(settings, state.pack(0)[0], begun.numel())
    left_out = state.tensors(0).get("left_out", torch.zeros_like(begun))
    torch.testing.assert_close(sent + left_out, wanted, rtol=1e-5, atol=1e-4)


@given(st.sampled_from(OUTER_COMPRESSIONS), st.integers(1, 5), st.integers(1, 4), st.data())
def test_error_feedback_of_means_loses_nothing(
    compression: str, parts: int, exchanges: int, data: st.DataObject
) -> None:
    """What was sent so far of a part's mean and what is left out of it is the sum of the means, also of no values."""
    settings, part = OuterStep(compression=compression), data.draw(st.integers(0, parts - 1))
    layer = nn.Linear(data.draw(st.integers(1, 300)), 1, bias=False)
    elements = layer.weight.numel()
    start, end = part_of(elements, part, parts)
    state = OuterState(settings, lambda index: FlatParameters([layer]), [0], {})
    weights = {pipeline: 2 * (pipeline + 1) / parts / (parts + 1) for pipeline in range(parts)}
    sent, wanted = torch.zeros(end - start), torch.zeros(end - start)
    for number in range(exchanges):
        each = {pipeline: drawn(end - start, 7 * number + pipeline) for pipeline in range(parts)}
        packed = {pipeline: pack_layer(settings, values) for pipeline, values in each.items()}
        for pipeline, weight in weights.items():
            wanted += unpack_layer(settings, packed[pipeline], end - start) * weight
        sent += unpack_layer(settings, state.average_part(0, part, packed, weights), end - start)
    left_out = state.tensors(0).get("left_out_of_mean", torch.zeros(end - start))
    torch.testing.assert_close(sent + left_out, wanted, rtol=1e-5, atol=1e-4)


def test_what_other_workers_have_left_out_of_means_is_forgotten() -> None:
    """Parts have another size where a run goes on with another number of workers."""
    settings, layer = OuterStep(compression="int8"), nn.Linear(30, 20)
    parameters = FlatParameters([layer])
    weights = {0: 0.5, 1: 0.25, 2: 0.25}
    first = OuterState(settings, lambda index: parameters, [0], {})
    first.average_part(0, 1, dict.fromkeys(weights, pack_layer(settings, drawn(207, 0))), weights)
    stored = first.tensors(0)
    assert len(stored["left_out_of_mean"]) == 207
    more = dict.fromkeys(range(4), 0.25)
    packed = dict.fromkeys(more, pack_layer(settings, drawn(155, 1)))
    found = [
        OuterState(settings, lambda index: parameters, [0], restored).average_part(0, 1, packed, more)
        for restored in ({0: stored}, {})
    ]
    assert found[0].tolist() == found[1].tolist()


def test_error_feedback_decays() -> None:
    settings = OuterStep(density=1e-6, feedback=0.5)
    layer = nn.Linear(3, 1)
    parameters = FlatParameters([layer])
    begun = torch.zeros(4)
    parameters.put_parameters(begun)
    state = OuterState(settings, lambda index: parameters, [0], {})
    parameters.put_parameters(-torch.tensor([4.0, 3.0, 2.0, 1.0]))
    assert unpack_layer(settings, state.pack(0)[0], 4).tolist() == [4, 0, 0, 0]
    parameters.put_parameters(begun)
    assert unpack_layer(settings, state.pack(0)[0], 4).tolist() == [0, 1.5, 0, 0]
    assert state.tensors(0)["left_out"].tolist() == [0, 0, 1, 0.5]
