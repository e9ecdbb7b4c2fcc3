import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.systems.asteroid.round_latency import NO_STEPS, RoundStep, dominant_step, prepend, round_latency_s

TIMES_S = st.floats(0, 10)


@st.composite
def rounds(draw: st.DrawFn) -> list[RoundStep]:
    """Execution and communication steps in turn, every number random."""
    steps = []
    for index in range(2 * draw(st.integers(1, 5)) - 1):
        if index % 2:
            steps.append(RoundStep(draw(TIMES_S), draw(TIMES_S), is_transfer=True))
        else:
            steps.append(RoundStep(draw(TIMES_S), draw(TIMES_S), draw(TIMES_S)))
    return steps


@given(rounds(), st.integers(1, 40), st.booleans())
def test_prepending_steps_gives_the_definition(steps: list[RoundStep], microbatches: int, duplex: bool) -> None:
    tail = NO_STEPS
    for step in reversed(steps):
        tail = prepend(step, tail, microbatches, duplex)
    assert tail.latency_s == pytest.approx(round_latency_s(steps, microbatches, duplex))


@given(rounds(), st.integers(1, 40))
def test_the_correction_only_shortens_and_only_where_transfers_dominate(
    steps: list[RoundStep], microbatches: int
) -> None:
    plain_s, corrected_s = (round_latency_s(steps, microbatches, duplex) for duplex in (False, True))
    assert corrected_s <= plain_s + 1e-9
    if not steps[dominant_step(steps, microbatches, duplex=False)].is_transfer:
        assert corrected_s == pytest.approx(plain_s)


def test_equal_stages_without_transfer_time_take_what_1f1b_takes() -> None:
    # (M + P - 1)(F + B) for P = 3 stages and M = 4.
    step, free = RoundStep(1.0, 2.0), RoundStep(0.0, 0.0, is_transfer=True)
    assert round_latency_s([step, free, step, free, step], 4) == 18.0


def test_a_sum_that_nothing_hides_comes_on_top() -> None:
    # The first stage is done last, and sums its gradients for 5 s after that.
    free = RoundStep(0.0, 0.0, is_transfer=True)
    assert round_latency_s([RoundStep(1.0, 2.0, 5.0), free, RoundStep(1.0, 2.0)], 4) == 20.0
    # The second is done 2 s earlier, which hides as much of its sum.
    assert round_latency_s([RoundStep(1.0, 2.0), free, RoundStep(1.0, 2.0, 5.0)], 4) == 18.0


def test_a_dominant_transfer_counts_both_directions_unless_corrected() -> None:
    steps = [RoundStep(1.0, 1.0), RoundStep(4.0, 4.0, is_transfer=True), RoundStep(1.0, 1.0)]
    # 10 microbatches there and back one after the other, or at once but for the first's way there and last's back.
    assert round_latency_s(steps, 10) == 10 * 8 + 2
    assert round_latency_s(steps, 10, duplex=True) == 9 * 4 + 8 + 2
