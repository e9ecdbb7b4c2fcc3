import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ring import ring_exchanges

ELEMENTS, PARTICIPANTS = st.integers(0, 40), st.integers(2, 9)


@settings(deadline=None)
@given(ELEMENTS, PARTICIPANTS, st.integers(0, 2**32 - 1))
def test_everybody_ends_with_the_sum(elements: int, participants: int, seed: int) -> None:
    before = np.random.default_rng(seed).integers(-1000, 1000, (participants, elements))
    values = before.copy()
    lists = [ring_exchanges(elements, participants, position) for position in range(participants)]
    for turn in zip(*lists, strict=True):
        sent = [values[position, slice(*exchange.send)].copy() for position, exchange in enumerate(turn)]
        for position, exchange in enumerate(turn):
            arrives, place = sent[position - 1], values[position, slice(*exchange.receive)]
            place[:] = place + arrives if exchange.adds else arrives
    np.testing.assert_array_equal(values, np.broadcast_to(before.sum(axis=0), values.shape))


@settings(deadline=None)
@given(ELEMENTS, PARTICIPANTS)
def test_what_one_sends_is_what_the_next_one_receives(elements: int, participants: int) -> None:
    lists = [ring_exchanges(elements, participants, position) for position in range(participants)]
    for turn in zip(*lists, strict=True):
        for position, exchange in enumerate(turn):
            assert exchange.receive == turn[position - 1].send
            assert exchange.adds == turn[0].adds


@settings(deadline=None)
@given(st.integers(0, 1000), PARTICIPANTS)
def test_each_sends_twice_all_but_one_chunk(elements: int, participants: int) -> None:
    sent = [
        sum(e.send[1] - e.send[0] for e in ring_exchanges(elements, participants, position))
        for position in range(participants)
    ]
    assert sum(sent) == 2 * (participants - 1) * elements
    # Chunks that do not divide evenly differ by one element.
    exact = 2 * (participants - 1) / participants * elements
    assert sent == pytest.approx([exact] * participants, abs=2)
    if elements % participants == 0:
        assert set(sent) == {round(exact)}


def test_three_participants_by_hand() -> None:
    exchanges = ring_exchanges(7, 3, position=1)
    # Chunks 0..2, 2..4, 4..7.
    assert [e.send for e in exchanges] == [(2, 4), (0, 2), (4, 7), (2, 4)]
    assert [e.receive for e in exchanges] == [(0, 2), (4, 7), (2, 4), (0, 2)]
    assert [e.adds for e in exchanges] == [True, True, False, False]
