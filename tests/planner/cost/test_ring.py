import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.synchronisation import all_reduce
from tests.helpers.processes.carrying_out import exchanges_of_all

PARTICIPANTS = st.integers(2, 9)


@given(st.integers(0, 50), PARTICIPANTS)
def test_what_one_sends_is_what_the_next_one_receives(elements: int, participants: int) -> None:
    lists = exchanges_of_all("ring", elements, ["a"] * participants)
    for number, turn in enumerate(zip(*lists, strict=True)):
        for position, exchange in enumerate(turn):
            assert exchange.round == number
            assert exchange.send_to == (position + 1) % participants
            assert exchange.receive_from == (position - 1) % participants
            assert exchange.receive == turn[position - 1].send
            assert exchange.adds == (number < participants - 1)


@given(st.integers(0, 1000), PARTICIPANTS)
def test_each_sends_twice_all_but_one_chunk(elements: int, participants: int) -> None:
    lists = exchanges_of_all("ring", elements, ["a"] * participants)
    sent = [sum(exchange.send_elements for exchange in each) for each in lists]
    assert sum(sent) == 2 * (participants - 1) * elements
    # Chunks that do not divide evenly differ by one element.
    exact = 2 * (participants - 1) / participants * elements
    assert sent == pytest.approx([exact] * participants, abs=2)
    if elements % participants == 0:
        assert set(sent) == {round(exact)}


def test_three_participants_by_hand() -> None:
    exchanges = all_reduce("ring", 7, ("a", "b", "a"), position=1)
    # Chunks 0..2, 2..4, 4..7.
    assert [e.send for e in exchanges] == [(2, 4), (0, 2), (4, 7), (2, 4)]
    assert [e.receive for e in exchanges] == [(0, 2), (4, 7), (2, 4), (0, 2)]
    assert [e.adds for e in exchanges] == [True, True, False, False]
