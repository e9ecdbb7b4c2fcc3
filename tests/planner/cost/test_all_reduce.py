"""What holds for every algorithm."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.plan.plan import ALGORITHMS
from tests.helpers.processes.carrying_out import carry_out, exchanges_of_all

ELEMENTS = st.integers(0, 50)
REGIONS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(elements=ELEMENTS, regions=REGIONS, seed=st.integers(0, 2**32 - 1))
def test_everybody_ends_with_the_sum(algorithm: str, elements: int, regions: list[str], seed: int) -> None:
    before = np.random.default_rng(seed).integers(-1000, 1000, (len(regions), elements))
    outcome = carry_out(exchanges_of_all(algorithm, elements, regions), before, seed)
    assert outcome.unfinished == outcome.undelivered == []
    np.testing.assert_array_equal(outcome.values, np.broadcast_to(before.sum(axis=0), before.shape))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(elements=ELEMENTS, regions=REGIONS)
def test_each_message_has_one_sender_and_one_receiver(algorithm: str, elements: int, regions: list[str]) -> None:
    lists = exchanges_of_all(algorithm, elements, regions)
    sent = [(e.round, p, e.send_to, e.send) for p, each in enumerate(lists) for e in each if e.send_to is not None]
    taken = [
        (e.round, e.receive_from, p, e.receive)
        for p, each in enumerate(lists)
        for e in each
        if e.receive_from is not None
    ]
    assert len({message[:3] for message in sent}) == len(sent) == len(taken)
    assert set(sent) == set(taken)
    assert all(source != target for _, source, target, _ in sent)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(elements=ELEMENTS, regions=REGIONS)
def test_the_rounds_of_a_participant_rise(algorithm: str, elements: int, regions: list[str]) -> None:
    for each in exchanges_of_all(algorithm, elements, regions):
        assert all(before.round < after.round for before, after in pairwise(each))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(elements=ELEMENTS, regions=REGIONS, seed=st.integers(0, 2**32 - 1))
def test_rounding_leaves_all_with_the_same_bits(algorithm: str, elements: int, regions: list[str], seed: int) -> None:
    before = np.random.default_rng(seed).lognormal(0, 10, (len(regions), elements)).astype(np.float32)
    values = carry_out(exchanges_of_all(algorithm, elements, regions), before, seed).values
    np.testing.assert_array_equal(values, np.broadcast_to(values[0], values.shape))
